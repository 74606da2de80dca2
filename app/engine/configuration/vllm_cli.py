"""The command line of `vllm serve`, read by vLLM's own parser: options -> typed values."""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, Action, ArgumentError
from collections.abc import Sequence
from typing import Any, NoReturn

from app.engine.configuration.options import VLLM_VERSION, set_environment
from app.errors import SettingsError


def parse(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse `vllm serve` options: name (with underscores) -> value, for those that are given.

    Like `vllm serve` it takes names with underscores, parts of JSON (`--compilation-config.mode 3`)
    and `--config FILE`, a YAML file of options, which those beside it override.

    Imports vllm, which takes seconds. Raises SettingsError naming the option that it does not
    have, or cannot read.
    """
    set_environment(os.environ)
    import yaml
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """vLLM's parser, which raises instead of ending the process."""

        def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
            namespace, unknown = super().parse_known_args(*args, **kwargs)
            for token in unknown:  # its value may be a secret, the name is enough
                name = re.sub(r"=.*", "", token, flags=re.DOTALL)
                raise SettingsError(name, f"no such option here or in vLLM {VLLM_VERSION}")
            return namespace, []

        def load_config_file(self, file_path: str) -> list[str]:
            with open(file_path, encoding="utf-8") as file:
                _check_options(yaml.safe_load(file))
            return super().load_config_file(file_path)  # type: ignore[no-any-return]

        def error(self, message: str) -> NoReturn:
            raise ArgumentError(None, message)

    parser = _with_options(Parser(exit_on_error=False, allow_abbrev=False))
    try:
        return vars(parser.parse_args(list(tokens)))
    except ArgumentError as error:
        names = (error.argument_name or "").split("/")
        option = next((name for name in names if name.startswith("--")), "options")
        raise SettingsError(option, error.message) from None
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError("--config", f"vLLM cannot read it: {error}") from None
    except (ValueError, IndexError, AssertionError) as error:
        raise SettingsError("options", f"vLLM cannot read them: {error}") from None


def _check_options(document: Any) -> None:
    """Raise SettingsError for a YAML document that is no mapping of options, where vLLM's parser
    raises whatever Python says of it."""
    if not isinstance(document, dict):
        what = "is empty" if document is None else "holds no options"
        problem = f"the file {what}: it must hold vLLM's options, such as 'port: 8000'"
        raise SettingsError("--config", problem)
    for name in document:
        if not isinstance(name, str):
            raise SettingsError("--config", f"the file holds {name!r}, which is no option's name")


def options() -> dict[str, Action]:
    """Every option of `vllm serve`: name (with underscores) -> its action. Imports vllm."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _with_options(FlexibleArgumentParser(add_help=False))
    return {action.dest: action for action in parser._actions}


def _with_options(parser: Any) -> Any:
    """The parser, with vLLM's options, which have no defaults: they are not given then."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

    parser = make_arg_parser(parser)
    for action in parser._actions:
        action.default = SUPPRESS
    return parser


def engine_argument_names() -> frozenset[str]:
    """Names that `engine.engine_args` may hold (vllm/engine/arg_utils.py)."""
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return frozenset(field.name for field in fields(AsyncEngineArgs))
