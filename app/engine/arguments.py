"""vLLM's command line, read by vLLM's own parser: `vllm serve` options -> typed values."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Sequence
from typing import Any

from app.errors import SettingsError


def parse(tokens: Sequence[str]) -> dict[str, Any]:
    """Option (with underscores) -> value, for the options that are given.

    Imports vllm, which takes seconds. Raises SettingsError naming the option that vLLM 0.32 does
    not have, or cannot read.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    for action in parser._actions:
        action.default = SUPPRESS
    try:
        namespace, unknown = parser.parse_known_args(list(tokens))
    except ArgumentError as error:
        names = (error.argument_name or "").split("/")
        option = next((name for name in names if name.startswith("--")), "options")
        raise SettingsError(option, error.message) from None
    for token in unknown:
        raise SettingsError(re.sub(r"=.*", "", token, flags=re.DOTALL), "vLLM has no such option")
    return vars(namespace)


def engine_argument_names() -> frozenset[str]:
    """What `engine.engine_args` may hold (vllm/engine/arg_utils.py)."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in fields(AsyncEngineArgs))
