"""The option parser that every bench command has."""

from __future__ import annotations

import argparse


def command_parser(name: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser for `aerie bench NAME`. Its help keeps the lines of `description`, the command's
    docstring, and options are not abbreviated, so that a new one cannot change what an old command
    line means."""
    return argparse.ArgumentParser(
        prog=f"aerie bench {name}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
