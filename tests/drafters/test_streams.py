"""A full disk under the log does not raise; in child processes, as pytest replaces the streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, multiprocessing, sys
from tqdm import tqdm
from drafters.streams import unfailing

def child():
    unfailing()
    list(tqdm(range(3)))
    print("from the child")

if __name__ == "__main__":
    unfailing()
    unfailing()
    logging.basicConfig(stream=sys.stderr)
    logging.error("nobody reads this: \\u00e4 \\ud800")
    print("nor this", flush=True)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return [sys.executable, str(file)]


def environment(unbuffered: str) -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": here, "PYTHONUNBUFFERED": unbuffered}


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nothing_fails_for_want_of_room(program: list[str], unbuffered: str) -> None:
    """Without: the child is not started (buffered), or ends in its progress bar (unbuffered)."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            program, stdout=full, stderr=full, env=environment(unbuffered), timeout=60, check=False
        )
    assert done.returncode == 0


def test_where_there_is_room_everything_is_written(program: list[str]) -> None:
    done = subprocess.run(
        program, capture_output=True, env=environment(""), timeout=60, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nor this\nfrom the child\n"
    assert "nobody reads this: ä \\ud800" in done.stderr
    assert "3/3" in done.stderr


CLOSED = """
import os, sys
from drafters.streams import open_missing
open_missing()
open_missing()
from tqdm import tqdm
list(tqdm(range(3)))
print("nobody reads this", flush=True)
assert sys.stdin.read() == ""
assert os.open(os.devnull, os.O_RDONLY) > 2
os.execv(sys.executable, [sys.executable, "-c", "import sys; print(1); sys.stdout.flush()"])
"""


def test_streams_that_are_closed_are_opened() -> None:
    """The fault: a start by `aerie serve >&- 2>&-` ended in a progress bar, and sockets got the
    numbers of the streams."""
    command = f"exec {sys.executable} -c '{CLOSED}' <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env=environment(""), timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_command_whose_output_cannot_be_written_fails(tmp_path: Path) -> None:
    """The fault: `aerie keys create bob > file` on a full disk lost the key, which is shown once,
    with exit code 0."""
    line = "from app.cli import run; run()"
    arguments = ["keys", "create", "bob", "--keys-file", str(tmp_path / "keys")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", line, *arguments],
            stdout=full, stderr=subprocess.PIPE, env=environment(""), timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"cannot write the output: No space left" in done.stderr
