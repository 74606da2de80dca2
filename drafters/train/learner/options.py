"""The options of `aerie learn`, with their defaults."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from drafters.train.head_option import head_folder
from drafters.train.learner.pacing import When
from drafters.train.template_option import add_template_option

# Tried on the default model (bench/LOG.md): 6,000 tokens of a language that the head hardly knew
# gained 1.7%, with certainty; a round of 50,000 takes ten minutes of a core with bfloat16.
NEW_TOKENS, ANSWER_TOKENS = 8_000, 50_000
K = 5
EPOCHS, SELECTOR_EPOCHS = 1.0, 0.3
MUON_LR, ADAM_LR = 6e-3, 6e-4  # half of what they change in a round is kept
LEAST_LOG_PROBABILITY = -4.0  # nats a token


def learn_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of `aerie learn`, whose help begins with `description`."""
    parser = argparse.ArgumentParser(
        prog="aerie learn",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of `aerie serve --learn`")
    parser.add_argument("--target", required=True, help="folder or hub id of the model served")
    parser.add_argument(
        "--head", type=head_folder, required=True,
        help="folder or hub id of the head that the gateway started with",
    )  # fmt: skip
    parser.add_argument("--child-of", type=int, default=0, help=argparse.SUPPRESS)

    pace = parser.add_argument_group("when to train")
    pace.add_argument(
        "--when", choices=get_args(When), default="idle",
        help="only while the gateway answers nothing, or always: on a machine of its own [idle]",
    )  # fmt: skip
    pace.add_argument(
        "--share", type=float, default=0.0, metavar="S",
        help="share of the time to train under load too [0]",
    )  # fmt: skip
    end = pace.add_mutually_exclusive_group()
    end.add_argument(
        "--forever", action="store_true",
        help="until it is stopped, as by default, or three attempts in a row failed: exit code 1",
    )  # fmt: skip
    end.add_argument("--rounds", type=int, metavar="N", help="until N candidates were made")
    end.add_argument("--minutes", type=float, metavar="M", help="for M minutes, waits included")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--mix", type=Path, nargs="+", default=[], metavar="FILE",
        help="prompts of `aerie train` that the target answers, mixed in [the texts beside HEAD]",
    )  # fmt: skip
    add_template_option(data)  # of the prompts of --mix: all other texts are token ids
    data.add_argument(
        "--mix-share", type=float, default=0.5, metavar="S", help="their share of all tokens [0.5]"
    )
    data.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, metavar="N",
        help="new tokens of answers that begin a round [8000]",
    )  # fmt: skip
    data.add_argument(
        "--answer-tokens", type=int, default=ANSWER_TOKENS, metavar="N",
        help="captured tokens of answers in a round, the newest of each tenant [50000]",
    )  # fmt: skip
    data.add_argument(
        "--max-length", type=int, default=4096, metavar="N",
        help="tokens of prompt and answer: longer answers are cut, longer prompts left out [4096]",
    )  # fmt: skip
    data.add_argument(
        "--least-log-probability", type=float, default=LEAST_LOG_PROBABILITY, metavar="P",
        help="leave out answers to whose tokens the target gives less, in nats on average [-4]",
    )  # fmt: skip

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=float, default=EPOCHS, help="passes over the texts [1]")
    training.add_argument(
        "--selector-epochs", type=float, default=SELECTOR_EPOCHS, metavar="E",
        help="passes over the texts of the path selector, if the head has one [0.3]",
    )  # fmt: skip
    training.add_argument(
        "--k", type=int, default=K, help="draft tokens that are trained and compared [5]"
    )
    training.add_argument("--muon-lr", type=float, default=MUON_LR, help="[0.006]")
    training.add_argument("--adam-lr", type=float, default=ADAM_LR, help="[0.0006]")
    training.add_argument("--device", help="[cuda if there is one, else cpu]")
    training.add_argument(
        "--threads", type=int, default=1, help="CPU threads, half of the cores at most [1]"
    )
    return parser


def option_problem(args: argparse.Namespace) -> str | None:
    """What is wrong with parsed options; None if nothing is."""
    if not args.folder.is_dir():
        return f"{args.folder} is no folder: give that of `aerie serve --learn`"
    if not (args.head / "config.json").is_file():
        return f"no head in {args.head}: a folder with config.json is needed"
    if missing := [str(file) for file in args.mix if not file.is_file()]:
        return f"--mix: there is no {missing[0]}"
    if not 0.0 <= args.mix_share < 1.0:
        return "--mix-share is a share of the tokens, below 1"
    if not 0.0 <= args.share <= 1.0:
        return "--share is a share of the time, 0 to 1"
    cores = os.cpu_count() or 1
    if not 1 <= args.threads <= max(cores // 2, 1):
        return f"--threads is 1 to {max(cores // 2, 1)}: half of the cores stay the gateway's"
    if min(args.new_tokens, args.answer_tokens, args.k) < 1:
        return "--new-tokens, --answer-tokens and --k are 1 or more"
    return None
