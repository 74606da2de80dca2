"""Options of `aerie serve` and `aerie doctor`: made from the settings tree, vLLM's handed on."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from app.settings import ENV_PREFIX, sections

# Listed first by --help; the others follow, section by section.
FIRST = (
    "model", "served_model_name", "drafter", "k", "host", "port", "api_key", "max_model_len",
    "tool_call_parser", "log_level",
)  # fmt: skip
# Options that take several values in vLLM: a second one must not be taken for MODEL.
_SEVERAL = frozenset({"served_model_name", "api_key"})
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NUMBER = re.compile(r"-\d")
EPILOG = (
    "Every setting is also an environment variable and a key of the TOML file. The command line "
    "overrides the environment, which overrides the file, which overrides the preset. vLLM's "
    "options are read as `vllm serve` reads them (`vllm serve --help=all` lists them); those that "
    "cannot work here are refused with the reason."
)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting, and the model as a positional argument."""
    parser.usage = "%(prog)s [MODEL] [options]"  # all of them would fill the first screen
    parser.epilog = EPILOG
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="the same as --model MODEL"
    )
    first = parser.add_argument_group("most needed")
    first.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings, or vLLM's YAML file of options. [AERIE_CONFIG]",
    )
    first.add_argument(
        "--preset",
        metavar="NAME",
        help="Preset name (`aerie models` lists them) or TOML file. [AERIE_PRESET]",
    )
    fields = {
        name: field for cls in sections().values() for name, field in cls.model_fields.items()
    }
    for name in FIRST:
        _add_option(first, name, fields[name])
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").splitlines()[0])
        for name, field in cls.model_fields.items():
            if name not in FIRST:
                _add_option(group, name, field)


def _add_option(group: Any, name: str, field: Any) -> None:
    options: dict[str, Any] = {"help": _described(name, field), "default": None}
    if field.annotation is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        choices = choices_of(field.annotation)
        word = name.rsplit("_", 1)[-1].upper()
        options["metavar"] = f"{{{','.join(choices)}}}" if choices else word
        options["nargs"] = "+" if name in _SEVERAL else None
    group.add_argument(f"--{name.replace('_', '-')}", **options)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values that a setting of this type may have; empty if any will do."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _described(name: str, field: Any) -> str:
    """What the setting is, its bounds, default and environment variable."""
    bounds, default = bounds_of(field), default_of(field)
    facts = [bounds] if bounds else []
    if default is not None:
        facts.append(f"default {default}")
    facts.append(f"{ENV_PREFIX}{name.upper()}")
    return f"{field.description} [{'; '.join(facts)}]".replace("%", "%%")


def bounds_of(field: Any) -> str:
    """The bounds of a setting in words; empty if it has none."""
    bounds = [
        f"{words} {getattr(bound, key):g}"
        for bound in field.metadata
        for key, words in _BOUNDS.items()
        if getattr(bound, key, None) is not None
    ]
    return ", ".join(bounds).capitalize()


def default_of(field: Any) -> Any:
    """The default of a setting; None if it has none, or an empty one."""
    default = field.get_default(call_default_factory=True)
    return None if default in (None, "", (), {}) else default


def split(arguments: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split a command's arguments into those for `parser` and those for vLLM's parser.

    An option that `parser` does not have goes to vLLM's, with the values behind it. Names may have
    underscores, as vLLM's may.
    """
    known = parser._option_string_actions
    ours: list[str] = []
    theirs: list[str] = []
    place = ours
    for argument in arguments:
        if argument.startswith("-") and not _NUMBER.match(argument):
            name, equals, value = argument.partition("=")
            plain = name.replace("_", "-")
            place = ours if plain in known else theirs
            argument = plain + equals + value if plain in known else argument
        place.append(argument)
    return ours, theirs
