"""The command line of `vllm serve`, read by vLLM's own parser: options -> typed values."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Sequence
from typing import Any, NoReturn

from app.engine.configuration.options import VLLM_VERSION
from app.errors import SettingsError


def parse(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse `vllm serve` options: name (with underscores) -> value, for those that are given.

    Like `vllm serve` it takes names with underscores, and parts of JSON
    (`--compilation-config.mode 3`).

    Imports vllm, which takes seconds. Raises SettingsError naming the option that it does not
    have, or cannot read.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """vLLM's parser, which raises instead of ending the process."""

        def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
            namespace, unknown = super().parse_known_args(*args, **kwargs)
            for token in unknown:  # its value may be a secret, the name is enough
                name = re.sub(r"=.*", "", token, flags=re.DOTALL)
                raise SettingsError(name, f"no such option here or in vLLM {VLLM_VERSION}")
            return namespace, []

        def error(self, message: str) -> NoReturn:
            raise ArgumentError(None, message)

    parser = make_arg_parser(Parser(exit_on_error=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = SUPPRESS
    try:
        return vars(parser.parse_args(list(tokens)))
    except ArgumentError as error:
        names = (error.argument_name or "").split("/")
        option = next((name for name in names if name.startswith("--")), "options")
        raise SettingsError(option, error.message) from None
    except (ValueError, IndexError) as error:
        raise SettingsError("options", f"vLLM cannot read them: {error}") from None


def engine_argument_names() -> frozenset[str]:
    """Names that `engine.engine_args` may hold (vllm/engine/arg_utils.py)."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in fields(AsyncEngineArgs))
