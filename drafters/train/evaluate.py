"""Acceptance length of a head on held-out prompts, for several K at once.

Lossless greedy speculation in plain torch: the target writes the text, the head drafts at
every point the walk visits, and a draft counts as far as it agrees. The figures are those of
an engine that runs the same models: tokens per target step, the bonus token included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from drafters.model.checkpoint import load_head
from drafters.model.llama import Llama, load_llama
from drafters.model.peagle import PEagleHead
from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.prompts import chat_prompts, code_prompts
from drafters.train.embedded.tokenizer import END_OF_TEXT, IM_END, load_tokenizer
from drafters.train.generate import generate
from drafters.train.rollouts import valid_lengths
from drafters.train.runtime import prepare_cpu
from drafters.train.walk import Acceptance, draft_everywhere, walk

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
COUNTS = (1, 3, 5, 7)
SEED = 2602
_BATCH = 48

Table = dict[str, dict[int, Acceptance]]


def held_out_prompts(target: Path, count: int) -> dict[str, list[list[int]]]:
    """The workloads: token ids of `count` prompts each, from files kept from training."""
    tokenizer, files = load_tokenizer(target), load_corpus().held_out
    return {
        "code": code_prompts(files, tokenizer, count, SEED),
        "chat": chat_prompts(files, tokenizer, count, SEED),
    }


def measure(
    head: PEagleHead,
    target: Llama,
    prompts: Sequence[Sequence[int]],
    end_tokens: Sequence[int],
    *,
    steps: int,
    counts: Sequence[int] = COUNTS,
) -> dict[int, Acceptance]:
    """Walk `steps` greedy tokens of each prompt, or to its end token, for each K."""
    deepest = max(counts)
    results = {count: Acceptance.nothing(count) for count in counts}
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        # The last draft of a request is verified in full, so the text has to go on behind it.
        text = generate(target, batch, steps + deepest)
        ends = valid_lengths(text[:, :steps], end_tokens)
        for prompt, row, end in zip(batch, text, ends.tolist(), strict=True):
            if end < 2:
                continue  # the first token ended the reply: nothing was left to draft
            tokens = torch.cat([torch.tensor(prompt), row])
            first, stop = len(prompt) - 1, len(prompt) + end
            drafted = draft_everywhere(head, target, tokens, first, stop - 3, deepest)
            for count, result in results.items():
                walk(drafted, tokens, first, stop, count, result)
    return results


def format_table(table: Mapping[str, Mapping[int, Acceptance]]) -> str:
    """Markdown, so that a model card can quote it."""
    positions = max(max(rows) for rows in table.values())
    head = ["workload", "K", "acceptance length", *(str(i + 1) for i in range(positions))]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, rows in table.items():
        for count, result in rows.items():
            cells = [f"{value:.3f}" for value in result.per_position]
            cells += [""] * (positions - count)
            lines.append(
                "| " + " | ".join([name, str(count), f"{result.length:.2f}", *cells]) + " |"
            )
    return "\n".join(lines)


def as_json(name: str, table: Mapping[str, Mapping[int, Acceptance]]) -> str:
    """One line for machines."""
    workloads = {
        workload: {
            str(count): {
                "acceptance_length": round(result.length, 4),
                "per_position": [round(value, 4) for value in result.per_position],
            }
            for count, result in rows.items()
        }
        for workload, rows in table.items()
    }
    return json.dumps({"head": name, "workloads": workloads})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="aerie evaluate", description=__doc__)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--head", type=Path, default=EMBEDDED / "p-eagle")
    parser.add_argument("--prompts", type=int, default=48, help="of each workload")
    parser.add_argument("--tokens", type=int, default=128, help="to generate for each prompt")
    parser.add_argument("--k", type=int, nargs="+", default=list(COUNTS), metavar="K")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    args = parser.parse_args(argv)
    prepare_cpu(args.threads)
    tokenizer = load_tokenizer(args.target)
    ends = [tokenizer.token_to_id(name) for name in (END_OF_TEXT, IM_END)]
    target, head = load_llama(args.target), load_head(args.head)
    table: Table = {}
    for name, prompts in held_out_prompts(args.target, args.prompts).items():
        table[name] = measure(head, target, prompts, ends, steps=args.tokens, counts=args.k)
    print(f"head {args.head.name}, {args.prompts} held-out prompts a workload, greedy")
    print(format_table(table))
    if args.json:
        print(as_json(args.head.name, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
