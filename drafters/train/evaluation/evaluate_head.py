"""Measure the acceptance length of draft heads on prompts, for several K at once.

This replays lossless speculation: the target writes its answers, the head drafts behind each
of their tokens, and a draft is accepted as far as it agrees with what the target wrote. Several
heads are compared on the same answers. No engine runs, but the figures are those that an engine
with the same models reports in `vllm:spec_decode_*`: acceptance length is 1 + accepted tokens /
drafts, and position i is the share of all drafts whose i-th token was accepted. As in the engine's
counters, the last step of a request counts in full: tokens behind an end token or beyond the token
limit are accepted, though never sent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from drafters.model.checkpoint import load_head
from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.head_check import TargetSizes, plain_name, target_problems
from drafters.model.head_values import read_head
from drafters.small_samples import CONFIDENCE
from drafters.train.evaluation.answers import Answers, write_answers
from drafters.train.evaluation.evaluate_options import COUNTS, evaluate_parser
from drafters.train.evaluation.greedy_replay import (
    AcceptanceCounts,
    agreement,
    draft_everywhere,
    walk,
)
from drafters.train.evaluation.position_noise import NoisyDrafts, PositionNoise
from drafters.train.evaluation.statistics import RESAMPLES
from drafters.train.evaluation.table import LEGEND, Figures, as_json, figures, format_table
from drafters.train.evaluation.workloads import (
    CHAT,
    DEFAULT_COUNT,
    HUMANEVAL,
    Prompts,
    Report,
    file_prompts,
    named_prompts,
)
from drafters.train.head_option import head_name
from drafters.train.optimisation.draft_passes import Chooser, most_probable
from drafters.train.runtime import prepare_cpu, slow_bfloat16
from drafters.train.target import FrozenTarget
from drafters.train.template_option import set_template

_REPORT_EVERY = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The counts of one workload, by K; `results` has only requests that took a step."""

    prompts: int
    tokens: int  # of all responses
    results: dict[int, AcceptanceCounts]


def refuse_absent_head(folder: Path) -> None:
    """Raise ValueError if there is no head in this folder."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"no head in {folder}: a folder with config.json is needed")


def load_fitting_head(folder: Path, target: FrozenTarget, name: str) -> DraftHead:
    """Load a head in the target's dtype, as an engine runs it. Raises ValueError if it does not
    fit the target, which the error calls `name`."""
    refuse_absent_head(folder)
    layers = target.shape.num_hidden_layers
    config = HeadConfig.load(folder, layers)
    if reasons := misfits(folder, config, target):
        raise ValueError(f"head {folder} does not fit target {name}: {'; '.join(reasons)}")
    head = load_head(folder, target.dtype, layers).to(target.device)
    head.share(embeddings=target.embeddings, lm_head=target.lm_head)
    return head


def misfits(folder: Path, config: HeadConfig, target: FrozenTarget) -> list[str]:
    """The reasons why a head cannot draft for a target; empty if it can."""
    own = frozenset(map(plain_name, read_head(folder)))
    shape = target.shape
    size = TargetSizes(shape.hidden_size, shape.vocab_size, shape.num_hidden_layers)
    return target_problems(config, size, own)


@torch.no_grad()
def measure(
    heads: Sequence[DraftHead],
    target: FrozenTarget,
    answers: Answers,
    *,
    counts: Sequence[int] = COUNTS,
    greedy_drafts: bool = False,
    report: Report = lambda text: None,
) -> list[WorkloadResult]:
    """Replay the target's answers with each head, for each K of `counts`. Drafts are drawn with the
    noise of the answers, if they were sampled, or are the most probable tokens. Raises ValueError
    if a K is above `answers.beyond`."""
    deepest = max(counts)
    if deepest > answers.beyond:
        raise ValueError(f"K is {deepest}, but the answers were made for K up to {answers.beyond}")
    agreeing: list[list[list[int]]] = [[] for _ in heads]
    told = time.monotonic()
    tables = [None if head.selector is None else head.selector_tables() for head in heads]
    layers = [head.config.eagle_aux_hidden_state_layer_ids for head in heads]
    lines = list(zip(answers.prompt_lengths, answers.written, answers.texts, strict=True))
    for index, (length, written, tokens) in enumerate(lines):
        if written > 1:  # an answer of one token takes no step with drafts
            first = length - 1
            last = first + written - 2
            read = tokens[None, : last + 1].to(target.device)
            # The target reads an answer once for all heads that read the same layers of it.
            taps = {each: target.states(read, each).taps for each in set(layers)}
            for number, head in enumerate(heads):
                choose: Chooser = most_probable
                if answers.noise is not None and not greedy_drafts:
                    choose = NoisyDrafts(
                        answers.noise, head, prompt=index, length=length, last=last + 1 + deepest
                    )
                drafted = draft_everywhere(
                    head, taps[layers[number]], tokens, first, last, deepest, choose, tables[number]
                )
                agreeing[number].append(agreement(drafted, tokens, first))
        if time.monotonic() - told > _REPORT_EVERY:
            told = time.monotonic()
            report(f"drafted behind {index + 1} of {len(lines)} answers")
    return [
        WorkloadResult(
            len(lines),
            sum(answers.written),
            {
                count: AcceptanceCounts.of([walk(row, count) for row in of_head], count)
                for count in counts
            },
        )
        for of_head in agreeing
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aerie evaluate`; returns the exit code, 2 for wrong options, files or models."""
    args = evaluate_parser(__doc__).parse_args(argv)
    report = partial(print, file=sys.stderr, flush=True)
    counts = sorted({count for part in args.k for count in part})
    prepare_cpu(args.threads)
    try:
        for folder in args.head:
            refuse_absent_head(folder)  # a large target takes minutes to load
        dtype = getattr(torch, args.dtype) if args.dtype else slow_bfloat16(args.device)
        target = FrozenTarget.load(args.target, dtype=dtype, device=args.device)
        set_template(target.tokenizer, args)
        heads = [load_fitting_head(folder, target, args.target) for folder in args.head]
        measured = _measure(args, target, heads, counts, report)
    except (OSError, ValueError) as error:
        report(f"aerie evaluate: error: {' '.join(str(error).split())}")
        return 2
    for folder, head, of_head in zip(args.head, heads, measured, strict=True):
        _print(args, target, head_name(folder), head.config.method, of_head)
    return 0


def _measure(
    args: argparse.Namespace,
    target: FrozenTarget,
    heads: Sequence[DraftHead],
    counts: Sequence[int],
    report: Report,
) -> list[dict[str, WorkloadResult]]:
    """The results of each head, by workload."""
    measured: list[dict[str, WorkloadResult]] = [{} for _ in heads]
    deepest = max(counts)
    for name, prompts in _workloads(args, target, deepest, report).items():
        tell = partial(_tell, report, name)
        tell(f"the target answers {len(prompts)} prompts")
        answers = write_answers(
            target, prompts, steps=args.tokens, beyond=deepest, noise=_noise(args, target)
        )
        if max(answers.written) < 2:
            raise ValueError(f"{name}: every answer ends with its first token, so no drafts")
        results = measure(
            heads, target, answers, counts=counts, greedy_drafts=args.greedy_drafts, report=tell
        )
        for of_head, result in zip(measured, results, strict=True):
            of_head[name] = result
    return measured


def _noise(args: argparse.Namespace, target: FrozenTarget) -> PositionNoise | None:
    """What the answers are sampled with; None where they are greedy."""
    if not args.temperature:
        return None
    return PositionNoise(args.temperature, target.shape.vocab_size, args.seed)


def _print(
    args: argparse.Namespace,
    target: FrozenTarget,
    name: str,
    method: str,
    measured: Mapping[str, WorkloadResult],
) -> None:
    """Print the table of one head, and with --json a line of JSON."""
    table = {workload: figures(item.results, args.seed) for workload, item in measured.items()}
    place, kind = _short(args.target), str(target.dtype).removeprefix("torch.")
    decoding = f"T = {args.temperature:g}" if args.temperature else "greedy"
    if args.temperature and args.greedy_drafts:
        decoding += " with greedy drafts"
    print(f"head {name} ({method}), target {place}, {decoding}, {kind} on {args.device}")
    for workload, item in measured.items():
        print(f"{workload}: {_sizes(item, table[workload])}")
    print(LEGEND)
    print(format_table(table))
    if args.json:
        settings = {
            "prompts": {workload: item.prompts for workload, item in measured.items()},
            "tokens": {workload: item.tokens for workload, item in measured.items()},
            "max_tokens": args.tokens,
            "files": args.prompts and [str(file) for file in args.prompts],
            "chat_template_kwargs": args.chat_template_kwargs,
            "temperature": args.temperature,
            "greedy_drafts": args.greedy_drafts or not args.temperature,
            "dtype": kind,
            "device": args.device,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "seed": args.seed,
        }
        facts = {"head": name, "method": method, "target": place, "settings": settings}
        print(as_json(table, **facts))


def _workloads(
    args: argparse.Namespace, target: FrozenTarget, deepest: int, report: Report
) -> Mapping[str, Prompts]:
    """The prompts of the chosen workloads. Raises ValueError if they do not fit the target."""
    positions = target.shape.max_position_embeddings
    room = positions - args.tokens - deepest
    if room < 1:
        raise ValueError(
            f"--tokens {args.tokens} and K {deepest} leave no room for a prompt in the target's "
            f"{positions} positions"
        )
    names = [name for part in args.workload or () for name in part]
    if not names and not args.prompts:
        names = [HUMANEVAL, CHAT]
    kwargs = args.chat_template_kwargs
    workloads = named_prompts(
        names, target.tokenizer, args.count, room, template_kwargs=kwargs, report=report
    )
    of_files = file_prompts(
        args.prompts or (),
        target.tokenizer,
        args.count or DEFAULT_COUNT,
        room,
        template_kwargs=kwargs,
        malformed=args.malformed,
        report=report,
    )
    if twice := sorted(set(workloads) & set(of_files)):
        raise ValueError(f"two workloads have the name {twice[0]!r}: rename a file")
    return {**workloads, **of_files}


def _short(target: str) -> str:
    """A folder relative to the current one if it lies below it; else the name as it is."""
    here = Path.cwd()
    return str(Path(target).relative_to(here)) if Path(target).is_relative_to(here) else target


def _tell(report: Report, name: str, text: str) -> None:
    report(f"{name}: {text}")


def _sizes(item: WorkloadResult, rows: Mapping[int, Figures]) -> str:
    text = f"{item.prompts} prompts, {item.tokens} tokens, "
    text += ", ".join(f"{row.steps} steps at K={count}" for count, row in _ends(rows))
    stepless = item.prompts - len(next(iter(item.results.values())).steps)
    return f"{text}; {stepless} answers of one token took no step" if stepless else text


def _ends(rows: Mapping[int, Figures]) -> list[tuple[int, Figures]]:
    items = list(rows.items())
    return items[:1] + items[1:][-1:]


if __name__ == "__main__":
    sys.exit(main())
