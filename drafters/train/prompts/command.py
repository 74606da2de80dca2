"""Let a target write user turns itself: prompts to train a draft head on, without any data set.

The turns are filtered: incomplete, over-long, unprintable and looping ones are dropped, so are
duplicates, and what shares ten words in a row with HumanEval, which heads are judged on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from drafters.train.examples import Example, MalformedLine, read_examples
from drafters.train.prompts.contamination import Contamination, humaneval
from drafters.train.prompts.filters import special_token_names
from drafters.train.prompts.sample import Sample, read_samples
from drafters.train.prompts.selection import Limits, Prompt, Selection, select


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except (MalformedLine, ValueError, OSError) as error:
        print(f"aerie prompts: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    samples = read_samples(args.samples)
    selection = _select(samples, tokenizer, args)
    print(_report(len(samples), selection))
    if not selection.kept:
        raise ValueError("no prompt is left")
    _write(args.out, selection.kept)
    print(f"wrote {args.out}: {len(selection.kept)} prompts")


def _select(samples: Sequence[Sample], tokenizer: Any, args: argparse.Namespace) -> Selection:
    avoid = [_text(example) for example in read_examples(args.avoid)] if args.avoid else []
    contamination = [] if args.allow_humaneval else [("HumanEval", humaneval())]
    if avoid:
        contamination.append(("--avoid", Contamination(avoid)))

    def count_tokens(texts: Sequence[str]) -> list[int]:
        encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return list(map(len, encoded))

    return select(
        samples,
        limits=Limits(args.min_tokens, args.max_turn_tokens, args.repeated, args.similarity),
        count_tokens=count_tokens,
        special_tokens=special_token_names(tokenizer),
        contamination=contamination,
        avoid=avoid,
    )


def _text(example: Example) -> str:
    if example.messages is None:
        return example.prompt or ""
    return "\n".join(item["content"] for item in example.messages if item["role"] == "user")


def _report(sampled: int, selection: Selection) -> str:
    kinds = Counter(prompt.kind for prompt in selection.kept)
    shares = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    lines = [f"sampled {sampled:7d}"]
    lines += [f"dropped {count:7d}  {name}" for name, count in selection.dropped.items()]
    return "\n".join([*lines, f"kept    {len(selection.kept):7d}  {shares}"])


def _write(file: Path, prompts: Iterable[Prompt]) -> None:
    """Write all at once: a reader sees the old file or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt.text}]
            line = {"messages": messages, "kind": prompt.kind}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(unfinished, file)


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="aerie prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", required=True, help="folder or hub id of a chat model")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines for aerie train")
    parser.add_argument(
        "--samples", type=Path, nargs="+", metavar="FILE", required=True,
        help="only filter raw samples that are there, and sample none",
    )  # fmt: skip
    filters = parser.add_argument_group("filters")
    filters.add_argument("--min-tokens", type=int, default=limits.min_tokens)
    filters.add_argument("--max-turn-tokens", type=int, default=limits.max_tokens)
    filters.add_argument(
        "--repeated", type=float, default=limits.repeated, metavar="SHARE",
        help="most of a turn's words that may lie in runs of four that came before in it",
    )  # fmt: skip
    filters.add_argument(
        "--similarity", type=float, default=limits.similarity,
        help="Jaccard similarity of word shingles from which two turns are near duplicates",
    )  # fmt: skip
    filters.add_argument(
        "--avoid", type=Path, nargs="+", metavar="FILE",
        help="JSON lines of prompts that no turn may quote or resemble",
    )  # fmt: skip
    filters.add_argument(
        "--allow-humaneval", action="store_true", help="keep turns that quote HumanEval"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
