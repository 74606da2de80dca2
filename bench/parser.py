"""The option parser of bench commands."""

from __future__ import annotations

import argparse


def command_parser(name: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser for `aerie bench NAME`. Its help keeps the lines of `description`, the command's
    docstring. Options cannot be abbreviated, so that a new one does not change what an old command
    line means."""
    return argparse.ArgumentParser(
        prog=f"aerie bench {name}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
