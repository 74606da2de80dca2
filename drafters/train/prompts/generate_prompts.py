"""Let a target write user turns itself: prompts to train a draft head on, without any data set.

The target continues its chat template's open user turn, sometimes after given first words. The
turns are then filtered: incomplete, unprintable and looping ones are dropped, and so are duplicates
and turns that share ten words in a row with HumanEval, on which heads are evaluated. A run that was
interrupted continues where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from drafters.packaged import resolve
from drafters.train.data.examples import MalformedLine, read_examples
from drafters.train.data.responses import (
    KEY_VARIABLE,
    ResponseServerError,
    respond,
    respond_by_server,
    server_url,
)
from drafters.train.number_options import positive_int, share_below_one
from drafters.train.progress import Progress
from drafters.train.prompts.contamination import Contamination, humaneval
from drafters.train.prompts.filters import special_token_names
from drafters.train.prompts.open_turn import OpenTurn, open_turn
from drafters.train.prompts.openings import DEFAULT_MIX, MIXES, Opening, read_openings
from drafters.train.prompts.output import user_text, write_prompts
from drafters.train.prompts.sample import Sample, read_samples
from drafters.train.prompts.sample_log import PART, SampleLog
from drafters.train.prompts.sampler import Generate, TurnSampler
from drafters.train.prompts.selection import FilterBounds, Selection, is_held_out, select
from drafters.train.runtime import prepare_cpu, slow_bfloat16
from drafters.train.target import (
    FrozenTarget,
    checkpoint_folder,
    description_fingerprint,
    end_tokens,
)
from drafters.train.template_option import add_template_option, set_template

# Options that change samples: a run with other values does not continue their file.
_SAMPLING = ("system", "max_tokens", "temperature", "min_p", "seed")
MAX_TOKENS = 256  # longest sampled turn; most are far shorter


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aerie prompts`; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except (MalformedLine, ResponseServerError, ValueError, OSError) as error:
        print(f"aerie prompts: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    prepare_cpu(args.threads)
    args.target = resolve(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    set_template(tokenizer, args)
    samples = read_samples(args.samples) if args.samples else _sample(tokenizer, args)
    selection = _select(samples, tokenizer, args)
    print(_report(len(samples), selection))
    kept = selection.kept
    # No two kept prompts are near duplicates, so no two of the files are either.
    held_out = [prompt for prompt in kept if is_held_out(prompt.text, args.held_out)]
    if len(held_out) == len(kept) or (args.held_out and not held_out):
        raise ValueError(
            f"{len(kept)} prompts are left; of these --held-out {args.held_out:g} takes "
            f"{len(held_out)}"
        )
    aside = set(held_out)
    files = {args.out: [prompt for prompt in kept if prompt not in aside]}
    if held_out:
        files[args.out.with_suffix(f".held-out{args.out.suffix}")] = held_out
    for file, prompts in files.items():
        write_prompts(file, prompts)
        print(f"wrote {file}: {len(prompts)} prompts")


def _sample(tokenizer: Any, args: argparse.Namespace) -> list[Sample]:
    """All samples of the run, reusing those of an earlier run with the same options."""
    with SampleLog(args.out.with_suffix(".samples.jsonl")) as log:
        return _sample_into(log, tokenizer, args)


def _sample_into(log: SampleLog, tokenizer: Any, args: argparse.Namespace) -> list[Sample]:
    openings = _openings(tokenizer, args)
    source = _source(tokenizer, args, log.options.get("dtype"))
    template = repr(tokenizer.chat_template).encode()
    log.begin({
        "target_sha256": source.fingerprint,
        "chat_template_sha256": hashlib.sha256(template).hexdigest(),
        "dtype": source.dtype,
        "chat_template_kwargs": args.chat_template_kwargs or None,  # as before there were any
        "openings": [asdict(opening) for opening, _ in openings],
        **{name: getattr(args, name) for name in _SAMPLING},
    })  # fmt: skip
    sampler = TurnSampler(
        tokenizer, source.generate, openings, count=args.count, max_tokens=args.max_tokens,
        end_tokens=source.end_tokens, seed=args.seed,
    )  # fmt: skip
    done = log.resume(args.count)
    print(f"samples: {done} of {args.count} exist already", flush=True)
    progress = Progress(tokens=max(args.count - done, 1), unit="samples")

    def count_response(tokens: int) -> None:
        progress.advance(1)

    for start in range(done, args.count, PART):
        stop = min(start + PART, args.count)
        # A server's responses arrive one by one, those of a batch in this process all at once.
        log.append(sampler.sample(start, stop, count_response if args.server else None))
        if (uncounted := stop - done - progress.tokens) > 0:
            progress.advance(uncounted)
    return log.read(args.count)


def _openings(tokenizer: Any, args: argparse.Namespace) -> list[tuple[Opening, OpenTurn]]:
    kwargs = args.chat_template_kwargs
    plain = open_turn(tokenizer, args.system, kwargs)
    openings: list[tuple[Opening, OpenTurn]] = []
    for opening in read_openings(args.openings) if args.openings else MIXES[args.mix]:
        if opening.system is None:
            openings.append((opening, plain))
            continue
        try:
            openings.append((opening, open_turn(tokenizer, opening.system, kwargs)))
        except ValueError as error:
            if args.openings:
                raise
            print(f"an opening of --mix {args.mix} is left out: {error}")
    return openings


@dataclass(frozen=True, slots=True)
class _Source:
    """A way to sample turns, with the facts that identify it in the log of samples."""

    generate: Generate
    fingerprint: str  # of the target
    dtype: str | None  # of the target's weights in this process; None with a server
    end_tokens: list[int]


def _source(tokenizer: Any, args: argparse.Namespace, recorded: str | None) -> _Source:
    """The source of samples, in --dtype, or else in the `recorded` type of existing samples.

    Without either, the faster type is measured, which can differ from start to start.
    """
    options = {"steps": args.max_tokens, "temperature": args.temperature, "min_p": args.min_p}
    if args.server:
        config = AutoConfig.from_pretrained(args.target)
        try:
            generation = GenerationConfig.from_pretrained(args.target)
        except OSError:  # an older checkpoint, whose config.json has these entries
            generation = GenerationConfig.from_model_config(config)
        key = os.environ.get(KEY_VARIABLE) or None
        generate = partial(respond_by_server, args.server, None, key=key, **options)
        ends = end_tokens(generation, tokenizer)
        # The server has the weights: they need not be here.
        fingerprint = description_fingerprint(checkpoint_folder(args.target))
        return _Source(generate, fingerprint, None, ends)
    name = args.dtype or recorded
    dtype = getattr(torch, name) if name else slow_bfloat16(args.device)
    print(f"target: loading {args.target}", flush=True)
    target = FrozenTarget.load(args.target, dtype=dtype, device=args.device)
    name = str(target.dtype).removeprefix("torch.")
    return _Source(partial(respond, target, **options), target.fingerprint, name, target.end_tokens)


def _select(samples: Sequence[Sample], tokenizer: Any, args: argparse.Namespace) -> Selection:
    avoid = [user_text(example) for example in read_examples(args.avoid)] if args.avoid else []
    contamination = [] if args.allow_humaneval else [("HumanEval", humaneval())]
    if avoid:
        contamination.append(("--avoid", Contamination(avoid)))

    def count_tokens(texts: Sequence[str]) -> list[int]:
        encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return list(map(len, encoded))

    return select(
        samples,
        limits=FilterBounds(args.min_length, args.max_length, args.repeated, args.similarity),
        count_tokens=count_tokens,
        special_tokens=special_token_names(tokenizer),
        contamination=contamination,
        avoid=avoid,
    )


def _report(sampled: int, selection: Selection) -> str:
    kinds = Counter(prompt.kind for prompt in selection.kept)
    shares = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    lines = [f"sampled {sampled:7d}"]
    lines += [f"dropped {count:7d}  {name}" for name, count in selection.dropped.items()]
    return "\n".join([*lines, f"kept    {len(selection.kept):7d}  {shares}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aerie prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", required=True, help="folder, hub id or packaged name of a chat model"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines for aerie train")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--count", type=positive_int, metavar="N",
        help="turns to sample; the filters drop some of them",
    )  # fmt: skip
    source.add_argument(
        "--samples", type=Path, nargs="+", metavar="FILE",
        help="filter raw samples of earlier runs, and sample none",
    )  # fmt: skip
    parser.add_argument(
        "--held-out", type=share_below_one, default=0.0, metavar="SHARE",
        help="put about this share of the prompts, such as 0.02, into a file beside OUT that ends "
        "in .held-out.jsonl; a hash of the prompt decides, also when more are sampled later",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"),
        help="[that of existing samples, else the checkpoint's; on a CPU float32 where that is "
        "faster]",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads [all]")
    _add_sampling(parser.add_argument_group("sampling"))
    _add_filters(parser.add_argument_group("filters"))
    return parser


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    openings = group.add_mutually_exclusive_group()
    openings.add_argument(
        "--mix", choices=tuple(MIXES), default=DEFAULT_MIX,
        help=f"mix of openings, the first words of turns [{DEFAULT_MIX}]",
    )  # fmt: skip
    openings.add_argument(
        "--openings", type=Path, metavar="FILE",
        help="your own mix of openings: JSON lines, or TOML, with text, system, share and kind",
    )  # fmt: skip
    group.add_argument(
        "--system", metavar="TEXT",
        help="system prompt before turns whose opening has none [the chat template's]",
    )  # fmt: skip
    add_template_option(group)
    group.add_argument(
        "--max-tokens", type=positive_int, default=MAX_TOKENS, help="longest turn, tokens"
    )
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument(
        "--min-p", type=float, default=0.05,
        help="least probability of a token, as a share of the most probable one's [0.05]",
    )  # fmt: skip
    group.add_argument(
        "--server", metavar="URL", type=server_url,
        help="let an OpenAI-compatible vLLM server of the same target sample; "
        f"its API key is read from {KEY_VARIABLE}",
    )  # fmt: skip


def _add_filters(group: argparse._ArgumentGroup) -> None:
    limits = FilterBounds()
    group.add_argument(
        "--min-length", type=int, default=limits.min_tokens, help="shortest turn, tokens"
    )
    group.add_argument(
        "--max-length", type=int, default=limits.max_tokens, help="longest turn, tokens"
    )
    group.add_argument(
        "--repeated", type=float, default=limits.repeated, metavar="SHARE",
        help="largest share of a turn's words in sequences of four that it had before",
    )  # fmt: skip
    group.add_argument(
        "--similarity", type=float, default=limits.similarity,
        help="Jaccard similarity of word shingles from which two turns are near duplicates",
    )  # fmt: skip
    group.add_argument(
        "--avoid", type=Path, nargs="+", metavar="FILE",
        help="JSON lines of prompts that no turn may quote or resemble",
    )  # fmt: skip
    group.add_argument(
        "--allow-humaneval", action="store_true", help="keep turns that quote HumanEval"
    )


if __name__ == "__main__":
    sys.exit(main())
