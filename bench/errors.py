"""How a bench command fails: one line on standard error and an exit code, never a traceback."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence

from app.errors import AerieError

Main = Callable[[Sequence[str]], int]
EXIT_FAILED, EXIT_STOPPED = 1, 130
# Errors whose cause is outside the command: an option, a file, a server, a child process.
FAILURES = (AerieError, OSError, RuntimeError, ValueError, subprocess.SubprocessError)


def reports_errors(command: str) -> Callable[[Main], Main]:
    """Decorator of a command's `main(argv)`: FAILURES are printed under the command's name, and
    become exit code 1. A KeyboardInterrupt becomes 130, with its text if it has one."""

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str]) -> int:
            try:
                return main(argv)
            except FAILURES as error:
                # An error may have no text; then its kind is printed.
                print(f"{command}: {str(error) or type(error).__name__}", file=sys.stderr)
                return EXIT_FAILED
            except KeyboardInterrupt as stop:
                print(f"{command}: {'; '.join(['stopped', *map(str, stop.args)])}", file=sys.stderr)
                return EXIT_STOPPED

        return run

    return decorate
