"""Scripts that begin with the same slow import: one process makes it, and forks for each script.

A forked script has the imported modules, and what it changes in them is gone when it ends. A fork
has no threads but the one that forks, so the import may start none that is needed later.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.parent_death import end_with_parent


class Preloaded:
    """A process that has imported the module in a file. It ends with the process that made it."""

    def __init__(self, module: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), str(module)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # select looks at the pipe alone
            start_new_session=True,  # a group to be killed with all that the scripts start
        )
        atexit.register(self.end)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self,
        script: Path,
        arguments: list[str],
        output: Path,
        *,
        environ: Mapping[str, str],
        timeout: float,
    ) -> int:
        """Run a script as `python SCRIPT ARGUMENTS` would; returns its exit code.

        `output` gets its standard output and error. After `timeout` seconds, the import included,
        TimeoutError is raised. This process ends then, and all that the script has started.
        """
        orders, codes = self._process.stdin, self._process.stdout
        assert orders is not None
        assert codes is not None
        order = {
            "script": str(script), "arguments": arguments, "output": str(output),
            "environ": dict(environ),
        }  # fmt: skip
        try:
            orders.write(json.dumps(order).encode() + b"\n")
            if not select.select([codes], [], [], timeout)[0]:
                raise TimeoutError(f"{script.name} took more than {timeout} s")
            code = codes.readline()
            if not code:
                raise RuntimeError(f"the process that forks for {script.name} has ended")
            return int(code)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the process, and what its scripts have started."""
        if self._process.returncode is None:  # nobody else has its id
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve(parent: int, module: Path) -> None:
    """Import the module, then fork for each order on standard input; a line on standard output has
    the script's exit code. In a fork it returns when the script has ended."""
    end_with_parent(parent)
    codes = os.dup(1)
    os.dup2(2, 1)  # what the import prints is no exit code
    before = dict(os.environ)
    sys.path[0] = str(module.parent)
    importlib.import_module(module.stem)
    sys.stdout.flush()  # or each fork would print it again
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    this = os.getpid()
    for line in sys.stdin:
        script = os.fork()
        if script == 0:
            end_with_parent(this)
            become(json.loads(line), imported)
            return
        _, status = os.waitpid(script, 0)
        os.write(codes, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def become(order: dict[str, Any], imported: dict[str, str]) -> None:
    """Run an order's script in this process, with what the import set in the environment."""
    os.environ.clear()
    os.environ.update({**order["environ"], **imported})
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    sys.argv = [order["script"], *order["arguments"]]
    sys.path[0] = str(Path(order["script"]).parent)
    runpy.run_path(order["script"], run_name="__main__")


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
