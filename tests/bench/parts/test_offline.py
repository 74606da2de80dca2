"""Lines of JSON from an engine's process: they come one by one, and a failure is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.settings import load
from bench.parts import offline
from bench.parts.offline import lines

MODULE = """
import json, os, pathlib, sys, time
assert sys.argv[1] == "--offline"
print("a message of vLLM's at " + os.environ["VLLM_LOGGING_LEVEL"])
print(json.dumps({"start": 1}), flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(json.dumps({"cell": 2}), flush=True)
sys.exit(len(sys.argv) - 3)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "engine_of_a_test.py").write_text(MODULE)
    os_environ = {k: v for k, v in os.environ.items() if k != "VLLM_LOGGING_LEVEL"}
    return {**os_environ, "PYTHONPATH": str(tmp_path)}


def test_a_line_comes_while_the_engine_still_runs(tmp_path: Path, environ: dict[str, str]) -> None:
    """So that an engine that is killed leaves the cells that it measured."""
    seen = tmp_path / "seen"
    found = lines("engine_of_a_test", [str(seen)], environ)
    assert next(found) == {"start": 1}
    seen.touch()  # the engine waits for it
    assert list(found) == [{"cell": 2}]


def test_what_the_engine_logs_is_on_standard_error(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(list(lines("engine_of_a_test", [str(tmp_path)], environ))) == 2
    assert capsys.readouterr().err == "a message of vLLM's at ERROR\n"
    level = {"VLLM_LOGGING_LEVEL": "INFO"}
    assert len(list(lines("engine_of_a_test", [str(tmp_path)], environ | level))) == 2
    assert capsys.readouterr().err == "a message of vLLM's at INFO\n"


def test_an_engine_that_fails_is_an_error_after_its_lines(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    found = lines("engine_of_a_test", [str(tmp_path), "fail"], environ)
    assert [next(found), next(found)] == [{"start": 1}, {"cell": 2}]
    with pytest.raises(RuntimeError, match="code 1"):
        next(found)


def test_a_packaged_model_is_started_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a bench that hands a packaged model's name to vLLM, which knows no such model."""
    started: list[dict[str, object]] = []
    monkeypatch.setattr("vllm.LLM", lambda **options: started.append(options))
    monkeypatch.setattr(offline, "resolve", lambda model: f"/converted/{model}")
    offline.start(load({}, {}, preset="smollm2-135m"))
    (options,) = started
    assert options["model"] == "/converted/packaged:smollm2-135m"
    assert options["served_model_name"] is None
