"""The process that runs one program: limits itself, reads the program from standard input, runs it.

`bench.quality.runner` starts it as `python -I child.py CPU_SECONDS ADDRESS_SPACE FILE_SIZE`. It
uses the standard library only, because the repository is not on its path. The exit code is the
result: PASSED only if the program ran to its end.
"""

from __future__ import annotations

import os
import resource
import sys

# Exit codes that a program is not likely to end with by itself.
PASSED, WRONG, RAISED = 86, 87, 88
OPEN_FILES = 32
# RLIMIT_NPROC does not bind root, so an audit hook refuses to start processes too.
_STARTS_PROCESS = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn", "subprocess.Popen",
})  # fmt: skip
_SIGNALS_PROCESS = frozenset({"os.kill", "os.killpg"})


def limit(cpu_seconds: int, address_space: int, file_size: int) -> None:
    """Limit this process from now on: CPU seconds, and sizes in bytes; no child processes."""
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
    """Run a program; returns the exit code of its outcome: PASSED, WRONG or RAISED.

    As in HumanEval's own harness it is not the main module: what an answer does only as a script,
    such as reading input, does not run.
    """
    try:
        # dont_inherit: this file's future statements must not apply to the program.
        exec(compile(source, "program.py", "exec", dont_inherit=True), {})
    except AssertionError:
        return WRONG
    except BaseException:  # SystemExit and KeyboardInterrupt are failures too
        return RAISED
    return PASSED


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS_PROCESS or event in _SIGNALS_PROCESS:
        raise PermissionError(f"{event} is not allowed here")


if __name__ == "__main__":
    text = sys.stdin.read()
    limit(*map(int, sys.argv[1:4]))
    # Skips the interpreter's shutdown: exit handlers and threads of the program do not count.
    os._exit(run(text))
