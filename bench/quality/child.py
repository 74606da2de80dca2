"""The process that runs one program: limits itself, reads the program from standard input, runs it.

Started as `python -I child.py CPU_SECONDS ADDRESS_SPACE FILE_SIZE` by `bench.quality.runner`.
Standard library only, since nothing of this repository is on its path. The exit code is the result:
PASSED only if the last line of the program was reached.
"""

from __future__ import annotations

import os
import resource
import sys

# No exit code that a program is likely to end with by itself.
PASSED, WRONG, RAISED = 86, 87, 88
OPEN_FILES = 32
# RLIMIT_NPROC does not hold for root, so that starting a process is refused here too.
_STARTS_PROCESS = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn", "subprocess.Popen",
})  # fmt: skip
_SIGNALS_PROCESS = frozenset({"os.kill", "os.killpg"})


def limit(cpu_seconds: int, address_space: int, file_size: int) -> None:
    """Limit this process for the rest of its life."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    sys.addaudithook(_refuse)


def run(source: str) -> int:
    """Run a program; returns the exit code that tells what came of it.

    As in HumanEval's own harness it is not the main module: what an answer does only as a script,
    such as reading input, is no part of the function.
    """
    try:
        # This file's future statements would hold for the program, too.
        exec(compile(source, "program.py", "exec", dont_inherit=True), {})
    except AssertionError:
        return WRONG
    except BaseException:  # SystemExit and KeyboardInterrupt are no success either
        return RAISED
    return PASSED


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS_PROCESS or event in _SIGNALS_PROCESS:
        raise PermissionError(f"{event} is not allowed here")


if __name__ == "__main__":
    text = sys.stdin.read()
    limit(*map(int, sys.argv[1:4]))
    # Without the interpreter's shutdown: what the program left behind does not count.
    os._exit(run(text))
