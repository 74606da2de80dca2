"""`aerie heads`: list, choose and export heads that were trained further on captured traffic."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import SettingsError
from drafters.learning import captured
from drafters.learning.lineage import (
    FIRST_HEAD,
    FOLDER,
    RECORDS,
    STARTED_WITH,
    Generation,
    Lineage,
)
from drafters.markdown import columns


def main(arguments: Sequence[str]) -> int:
    """Run one subcommand. Raises SettingsError for what cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except OSError as error:  # such as another user's folder
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise SettingsError("heads", problem) from None
    except ValueError as error:  # a damaged file
        raise SettingsError("heads", str(error)) from None


def _run(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise SettingsError("heads", f"{options.folder} is no folder: give that of --learn")
    if not any((options.folder / name).exists() for name in (FIRST_HEAD, captured.FOLDER, FOLDER)):
        problem = f"{options.folder} is no folder of --learn: nothing was captured or learned in it"
        raise SettingsError("heads", problem)
    lineage = Lineage(options.folder)
    if options.action == "use":
        _use(lineage, options.generation)
    elif options.action == "export":
        _export(lineage, options.generation, options.out)
    elif options.json:
        print(json.dumps(_document(lineage), indent=2))
    else:
        print(_table(lineage))
    return 0


def _use(lineage: Lineage, chosen: int | None) -> None:
    try:
        lineage.pin(chosen)
    except KeyError:
        problem = f"there is no generation {chosen}, or its weights are gone"
        raise SettingsError("heads", problem) from None
    if chosen is None:
        print("unpinned: trials choose again")
    else:
        print(f"generation {chosen} is pinned: a gateway that runs loads it now, others at start")


def _export(lineage: Lineage, number: int | None, out: Path) -> None:
    """Copy a head, without what its provenance says of tenants."""
    if number in (None, STARTED_WITH):
        raise SettingsError("heads", "generation 0 is the head that the gateway was started with")
    assert number is not None
    try:
        generation = lineage.generation(number)
    except KeyError:
        raise SettingsError("heads", f"there is no generation {number}") from None
    if not generation.has_weights:
        problem = f"the weights of generation {number}, which was {generation.verdict}, are gone"
        raise SettingsError("heads", problem)
    if out.exists():
        raise SettingsError("heads", f"{out} exists already")
    # Hidden files are what a kill has left of a record, with its tenants.
    left_out = shutil.ignore_patterns(*RECORDS, ".*")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        copy = Path(folder) / "head"
        shutil.copytree(generation.folder, copy, ignore=left_out)
        shared = json.dumps(_without_tenants(generation.provenance), indent=2)
        (copy / "provenance.json").write_text(shared + "\n")
        copy.rename(out)  # it appears whole
    print(f"wrote {out}; next: aerie serve --drafter {out}, with its model")


def _without_tenants(value: Any) -> Any:
    """A record without its parts named `tenants`, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_tenants(item) for key, item in value.items() if key != "tenants"}
    return value


def _document(lineage: Lineage) -> dict[str, Any]:
    """All that is known of the generations, as `aerie heads list --json` prints it."""
    return {
        "in_force": lineage.in_force(),
        "pinned": lineage.pinned(),
        "generations": [
            {
                "generation": item.number,
                "verdict": item.verdict,
                "provenance": dict(item.provenance),
                "trial": item.trial and dict(item.trial),
            }
            for item in lineage.generations()
        ],
    }


def _table(lineage: Lineage) -> str:
    rows = [["generation", "from", "answer tokens", "until", "replay", "mix", "trial", "verdict"]]
    rows.append([_marked(lineage, STARTED_WITH), *["-"] * 6, "started with"])
    for item in lineage.generations():
        facts = item.provenance
        data, replay = facts.get("data", {}), facts.get("replay", {})
        against, trial = item.replayed_against, item.trial or {}
        rows.append([
            _marked(lineage, item.number), str(facts.get("parent", "-")),
            str(data.get("tokens", "-")), str(data.get("to", "-")),
            _ratio(replay.get("captured"), against), _ratio(replay.get("mix"), against),
            _ratio(trial, trial.get("against")), _verdict(item),
        ])  # fmt: skip
    note = "ratios: over the generation named, with 95% intervals if no other confidence is named"
    return "\n".join([*columns(rows), note])


def _marked(lineage: Lineage, number: int) -> str:
    marks = [] if lineage.in_force() != number else ["in force"]
    marks += [] if lineage.pinned() != number else ["pinned"]
    return f"{number} ({', '.join(marks)})" if marks else str(number)


def _verdict(generation: Generation) -> str:
    if generation.kept_by_replay:
        return f"{generation.verdict} by the replay"
    refused = generation.trial and generation.trial.get("refused")
    reason = refused or generation.provenance.get("reason")
    # In one line, as a row of the table is.
    return f"{generation.verdict}: {' '.join(reason.split())}" if reason else generation.verdict


def _ratio(figures: Mapping[str, Any] | None, against: int | None) -> str:
    """`1.08 (1.05 to 1.11, 98.75%) over 3`, or `-` where nothing is known."""
    if not figures or figures.get("ratio") is None:
        return "-"
    text = f"{figures['ratio']:.3f}"
    if interval := figures.get("interval"):
        confidence = figures.get("confidence")
        named = f", {100 * confidence:g}%" if confidence else ""
        text += f" ({interval[0]:.3f} to {interval[1]:.3f}{named})"
    return text if against is None else f"{text} over {against}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerie heads", description=__doc__, allow_abbrev=False)
    folder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    folder.add_argument("folder", type=Path, metavar="DIR", help="folder of `aerie serve --learn`")
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser(
        "list", parents=[folder], help="print every generation", allow_abbrev=False
    )
    show.add_argument("--json", action="store_true", help="print all that is known, as JSON")
    use = actions.add_parser(
        "use", parents=[folder], help="choose the generation that drafts", allow_abbrev=False
    )
    use.add_argument(
        "generation", type=_choice, metavar="N", help="its number, 0 for the first head, or auto"
    )
    export = actions.add_parser(
        "export", parents=[folder], help="copy a head out of the folder", allow_abbrev=False
    )
    export.add_argument("generation", type=_choice, metavar="N", help="its number")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write, a new one")
    return parser


def _choice(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `auto`")
    return int(text)
