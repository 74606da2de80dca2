"""Programs that misbehave, each in one way, and the outcomes that the runner reports."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.quality.runner import Outcome, ProcessLimits, run_program

SHORT = ProcessLimits(cpu_seconds=1, wall_seconds=120.0, address_space=256 << 20, file_size=4096)


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("assert sum([1, 2]) == 3", "passed"),
        ("print('x' * 10_000_000)", "passed"),
        ("import sys\nsys.stderr.write('x' * 10_000_000)", "passed"),
        ("assert sum([1, 2]) == 4", "wrong"),
        ("1 / 0", "raised"),
        ("def f(:", "raised"),
        ("def f(x: List[int]): pass", "raised"),
        ("from __future__ import annotations\ndef f(x: List[int]): pass", "passed"),
        ("import sys\nsys.exit(0)", "raised"),
        ("quit()", "raised"),
        ("raise KeyboardInterrupt", "raised"),
        ("import os\nos._exit(0)", "killed"),
        ("input()", "raised"),
        ("if __name__ == '__main__':\n    input()", "passed"),
        ("def f():\n    f()\nf()", "raised"),
        ("while True:\n    pass", "killed"),
        ("x = bytearray(1 << 30)", "raised"),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 20))", "raised"),
        ("open('big', 'wb').write(bytes(1 << 20))", "raised"),
        ("import os\nassert os.listdir() == []", "passed"),
        ("import os\nassert set(os.environ) <= {'HOME', 'TMPDIR', 'LANG', 'PATH'}", "passed"),
        ("import os\nos.fork()", "raised"),
        ("import subprocess\nsubprocess.run(['true'])", "raised"),
        ("import os\nos.system('true')\n", "raised"),
        ("import os\nos.kill(os.getppid(), 0)", "raised"),
        ("files = [open('f', 'w') for _ in range(99)]", "raised"),
        ("assert '\ud800'", "raised"),
    ],
)  # fmt: skip
def test_what_comes_of_a_program(source: str, outcome: Outcome) -> None:
    assert run_program(source, SHORT) == outcome


def test_a_program_that_sleeps_is_ended_by_the_clock() -> None:
    began = time.monotonic()
    assert run_program("import time\ntime.sleep(60)", ProcessLimits(wall_seconds=1.0)) == "timeout"
    assert time.monotonic() - began < 50.0


def test_a_fork_bomb_starts_nothing(tmp_path: Path) -> None:
    """Each process that came up would leave a file; the first could write where it likes."""
    bomb = f"""
import os
while True:
    try:
        os.fork()
        open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
    except OSError:
        pass
"""
    assert run_program(bomb, SHORT) == "killed"
    assert list(tmp_path.iterdir()) == []


def test_descriptors_of_this_process_are_not_inherited(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        source = f"import os\ntry:\n    os.fstat({file.fileno()})\nexcept OSError:\n    pass\n"
        source += "else:\n    raise AssertionError"
        assert file.fileno() > 2
        assert run_program(source) == "passed"


def test_the_working_directory_is_gone_afterwards(tmp_path: Path) -> None:
    told = tmp_path / "where"
    source = f"import os\nopen('a', 'w').close()\nopen({str(told)!r}, 'w').write(os.getcwd())"
    assert run_program(source) == "passed"
    assert not Path(told.read_text()).exists()
