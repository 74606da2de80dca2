"""A script runs in a fork as it would run by itself, without the import."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.drafters.preloaded import Preloaded
from tests.waiting import until

REPOSITORY = Path(__file__).parents[2]
MODULE = """
import os
os.environ["SET_BY_IMPORT"] = "1"
print("an import may print")
MADE_IN, changed = os.getpid(), False
"""
# What a script sees, and what it changes.
SCRIPT = """
import json, os, sys
import beside, slow
print(json.dumps([slow.MADE_IN, os.getppid(), slow.changed, sys.argv[1:], beside.__name__,
                  os.environ.get("SET_BY_IMPORT"), os.environ.get("OF_THE_JOB"), __name__]))
slow.changed = True
"""
# Starts a process, writes both ids, and goes on for longer than anybody waits.
ENDLESS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
PARENT = """
import os, sys
from pathlib import Path
from tests.drafters.preloaded import Preloaded
folder = Path(sys.argv[1])
Preloaded(folder / "slow.py", os.environ).run(
    folder / "endless.py", [str(folder / "ids")], folder / "output", environ=os.environ, timeout=600
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(MODULE)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "endless.py").write_text(ENDLESS)
    return tmp_path


@pytest.fixture
def preloaded(folder: Path) -> Iterator[Preloaded]:
    environ = {**os.environ, "OF_THE_JOB": "of the start", "PYTHONUNBUFFERED": ""}
    process = Preloaded(folder / "slow.py", environ)
    yield process
    process.end()


def run(preloaded: Preloaded, script: Path, *arguments: str, **more: str) -> int:
    output, environ = script.parent / "output", {**os.environ, **more}
    return preloaded.run(script, list(arguments), output, environ=environ, timeout=60.0)


def ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_scripts_share_the_import_and_nothing_else(folder: Path, preloaded: Preloaded) -> None:
    seen = []
    for value in ("a", None):
        more = {} if value is None else {"OF_THE_JOB": value}
        assert run(preloaded, folder / "script.py", "x", "y", **more) == 0
        seen.append(json.loads((folder / "output").read_text()))
    made_in = seen[0][0]
    assert made_in != os.getpid()
    assert seen == [
        [made_in, made_in, False, ["x", "y"], "beside", "1", value, "__main__"]
        for value in ("a", None)
    ]


def test_what_takes_too_long_ends_with_all_that_it_started(
    folder: Path, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = folder / "ids"

    def time_is_up(*_: object) -> tuple[list[int], list[int], list[int]]:
        until(ids.exists)
        return [], [], []

    monkeypatch.setattr(select, "select", time_is_up)
    with pytest.raises(TimeoutError, match=r"endless\.py took more than 60"):
        run(preloaded, folder / "endless.py", str(ids))
    assert not preloaded.alive
    for process in map(int, ids.read_text().split()):
        until(lambda process=process: ended(process))


def test_it_ends_with_its_parent_and_so_does_a_script(folder: Path) -> None:
    ids = folder / "ids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], cwd=REPOSITORY)
    try:
        until(ids.exists)
        script, child = map(int, ids.read_text().split())
        imported = psutil.Process(script).ppid()
    finally:
        parent.kill()
        parent.wait()
    until(lambda: ended(script))
    until(lambda: ended(imported))
    os.kill(child, signal.SIGKILL)  # what a script starts is the script's to end
