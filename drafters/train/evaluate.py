"""Acceptance length of a draft head on prompts, for several K at once.

Lossless greedy speculation: the target writes its answers, the head drafts behind each of their
tokens, and a draft counts as far as it agrees with what the target wrote. No engine runs, and
the figures are those of one that serves the same models and reports `vllm:spec_decode_*`:
acceptance length is 1 + accepted tokens / drafts, and position i the share of all drafts whose
i-th token was accepted. As in the engine's counters, the last step of a request counts in full:
accepted tokens behind an end token or beyond the token limit are accepted, though never sent.
"""

from __future__ import annotations

import argparse
import copy
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
from drafters.train.respond import respond
from drafters.train.runtime import prepare_cpu
from drafters.train.statistics import CONFIDENCE, RESAMPLES
from drafters.train.table import LEGEND, Figures, as_json, figures, format_table
from drafters.train.target import FrozenTarget
from drafters.train.walk import Acceptance, agreement, draft_everywhere, walk
from drafters.train.workloads import Prompts, Report, file_prompts, held_out_prompts, is_embedded

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
COUNTS = tuple(range(1, 12))
_DTYPES = ("bfloat16", "float16", "float32")
_REPORT_EVERY = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """What one workload gave; `results` covers the requests that took a step."""

    prompts: int
    tokens: int  # of all responses
    results: dict[int, Acceptance]


def load_pair(
    target: str, head: Path, *, dtype: torch.dtype | None, device: str
) -> tuple[FrozenTarget, DraftHead]:
    """Both models, the head in the target's dtype as an engine runs it, or ValueError."""
    if not (head / "config.json").is_file():
        raise ValueError(f"no head in {head}: a folder with config.json is needed")
    config = HeadConfig.load(head)
    frozen = FrozenTarget.load(target, dtype=dtype, device=device)
    reasons = misfits(config, frozen)
    if reasons:
        raise ValueError(f"head {head} does not fit target {target}: {'; '.join(reasons)}")
    loaded = load_head(head, frozen.dtype).to(frozen.device)
    loaded.share(embeddings=frozen.embeddings, lm_head=frozen.lm_head)
    return frozen, loaded


def misfits(config: HeadConfig, target: FrozenTarget) -> list[str]:
    """Why a head cannot draft for a target; nothing if it can."""
    shape, reasons = target.shape, []
    if config.target_hidden_size != shape.hidden_size:
        reasons.append(
            f"it reads hidden states of {config.target_hidden_size}, not {shape.hidden_size}"
        )
    # The target's matrices may be padded beyond the tokens that there are.
    if not min(len(target.tokenizer), shape.vocab_size) <= config.vocab_size <= shape.vocab_size:
        reasons.append(f"its vocabulary has {config.vocab_size} tokens, not {shape.vocab_size}")
    taps = config.eagle_aux_hidden_state_layer_ids
    if not 0 <= taps[0] <= taps[-1] <= shape.num_hidden_layers:
        reasons.append(
            f"it taps layers {', '.join(map(str, taps))} of {shape.num_hidden_layers}",
        )
    return reasons


def measure(
    head: DraftHead,
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    counts: Sequence[int] = COUNTS,
    report: Report = lambda text: None,
) -> Measured:
    """Walk up to `steps` greedy tokens of each prompt, to its end token, for each K."""
    deepest = max(counts)
    report(f"the target answers {len(prompts)} prompts")
    answers = dict(respond(target, prompts, steps=steps, temperature=0.0, seed=0))
    # The last drafts reach behind the answer, so the target goes on writing behind its end.
    endless = copy.copy(target)
    endless.end_tokens = []
    texts = [answers[index].tokens for index in range(len(prompts))]
    longer = dict(
        respond(endless, [text.tolist() for text in texts], steps=deepest, temperature=0.0, seed=0)
    )
    written = [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    agreeing: list[list[int]] = []
    told = time.monotonic()
    for index, prompt in enumerate(prompts):
        if written[index] > 1:  # otherwise its first token ended it: nothing was left to draft
            first, tokens = len(prompt) - 1, longer[index].tokens
            last = first + written[index] - 2
            drafted = draft_everywhere(head, target, tokens, first, last, deepest)
            agreeing.append(agreement(drafted, tokens, first))
        if time.monotonic() - told > _REPORT_EVERY:
            told = time.monotonic()
            report(f"drafted behind {index + 1} of {len(prompts)} answers")
    results = {
        count: Acceptance.of([walk(row, count) for row in agreeing], count) for count in counts
    }
    return Measured(len(prompts), sum(written), results)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code, 2 for what the caller can mend."""
    args = _parser().parse_args(argv)
    report = partial(print, file=sys.stderr, flush=True)
    counts = sorted({count for part in args.k for count in part})
    prepare_cpu(args.threads)
    try:
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        target, head = load_pair(args.target, args.head, dtype=dtype, device=args.device)
        measured: dict[str, Measured] = {}
        for name, prompts in _workloads(args, target, max(counts), report).items():
            tell = partial(_tell, report, name)
            measured[name] = measure(
                head, target, prompts, steps=args.tokens, counts=counts, report=tell
            )
            if not len(measured[name].results[counts[0]].steps):
                raise ValueError(f"{name}: every answer ends with its first token, so no drafts")
    except (OSError, ValueError) as error:
        report(f"aerie evaluate: error: {' '.join(str(error).split())}")
        return 2
    table = {name: figures(item.results, args.seed) for name, item in measured.items()}
    name, method = args.head.resolve().name, head.config.method
    place, kind = _short(args.target), str(target.dtype).removeprefix("torch.")
    print(f"head {name} ({method}), target {place}, greedy, {kind} on {args.device}")
    for workload, item in measured.items():
        print(f"{workload}: {_sizes(item, table[workload])}")
    print(LEGEND)
    print(format_table(table))
    if args.json:
        settings = {
            "prompts": {name: item.prompts for name, item in measured.items()},
            "tokens": {name: item.tokens for name, item in measured.items()},
            "max_tokens": args.tokens,
            "files": args.prompts and [str(file) for file in args.prompts],
            "temperature": 0.0,
            "dtype": kind,
            "device": args.device,
            "confidence": CONFIDENCE,
            "resamples": RESAMPLES,
            "seed": args.seed,
        }
        facts = {"head": name, "method": method, "target": place, "settings": settings}
        print(as_json(table, **facts))
    return 0


def _workloads(
    args: argparse.Namespace, target: FrozenTarget, deepest: int, report: Report
) -> Mapping[str, Prompts]:
    """The prompts asked for, checked against the target; ValueError says what is wrong."""
    positions = target.shape.max_position_embeddings
    room = positions - args.tokens - deepest
    if room < 1:
        raise ValueError(
            f"--tokens {args.tokens} and K {deepest} leave no room for a prompt in the target's "
            f"{positions} positions"
        )
    if args.prompts:
        return file_prompts(
            args.prompts,
            target.tokenizer,
            args.count,
            room,
            malformed=args.malformed,
            report=report,
        )
    if not is_embedded(target.tokenizer):
        raise ValueError(
            f"the embedded workloads are written in the embedded target's tokens; target "
            f"{args.target} has others: give --prompts FILE"
        )
    workloads = held_out_prompts(target.tokenizer.backend_tokenizer, args.count)
    if longest := [name for name, prompts in workloads.items() if max(map(len, prompts)) > room]:
        raise ValueError(
            f"--tokens {args.tokens} leaves {room} positions: too few for {longest[0]}"
        )
    return workloads


def _short(target: str) -> str:
    """A folder below the current one without the way there, a hub id as it is."""
    here = Path.cwd()
    return str(Path(target).relative_to(here)) if Path(target).is_relative_to(here) else target


def _tell(report: Report, name: str, text: str) -> None:
    report(f"{name}: {text}")


def _sizes(item: Measured, rows: Mapping[int, Figures]) -> str:
    text = f"{item.prompts} prompts, {item.tokens} tokens, "
    text += ", ".join(f"{row.steps} steps at K={count}" for count, row in _ends(rows))
    stepless = item.prompts - len(next(iter(item.results.values())).steps)
    return f"{text}; {stepless} answers of one token took no step" if stepless else text


def _ends(rows: Mapping[int, Figures]) -> list[tuple[int, Figures]]:
    items = list(rows.items())
    return items[:1] + items[1:][-1:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aerie evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Without arguments: the embedded P-EAGLE head on the embedded workloads. `code`\n"
        "continues held-out files of the standard library, `chat` answers questions about them.\n"
        "Decoding is greedy; there is no temperature. Progress goes to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", default=str(EMBEDDED / "target"), metavar="PATH", help="folder or hub id"
    )
    parser.add_argument(
        "--head", type=Path, default=EMBEDDED / "p-eagle", metavar="PATH", help="folder"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines with `messages` or `prompt`; each file is a workload of its name "
        "(default: the embedded workloads, for targets with the embedded tokenizer)",
    )
    parser.add_argument(
        "--malformed",
        choices=("fail", "skip"),
        default="fail",
        help="what to do about a line that is no prompt (default: fail)",
    )
    parser.add_argument(
        "--count", type=_positive, default=48, help="prompts of each workload (default: 48)"
    )
    parser.add_argument(
        "--tokens", type=_positive, default=128, help="longest answer, in tokens (default: 128)"
    )
    parser.add_argument(
        "--k",
        type=_counts,
        nargs="+",
        default=[list(COUNTS)],
        metavar="K",
        help="numbers of drafted tokens, like 1-11 or 3,5,7; also beyond what the head was "
        "trained for (default: 1-11)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the intervals (default: 0)")
    parser.add_argument("--threads", type=_positive, help="of the CPU (default: all)")
    parser.add_argument(
        "--device",
        type=_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one, otherwise cpu",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="default: the target checkpoint's")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # torch was built without it, or has no such
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    return text


def _counts(text: str) -> list[int]:
    """`1-11`, `3,5,7` or a mixture."""
    counts: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise argparse.ArgumentTypeError(f"not a list of K like 1-11 or 3,5,7: {text!r}")
        counts += range(int(low), int(high or low) + 1)
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"K must be at least 1: {text!r}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
