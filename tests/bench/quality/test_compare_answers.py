"""`aerie bench answers` against a gateway that streams scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.load import client
from bench.quality import compare_answers
from bench.workloads.prompt import Prompt
from tests.clock import Clock
from tests.http_server import Handler, serving
from tests.waiting import until

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
BODY = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
RIGHT, OTHER, WRONG = '{"a": "x"}', '{"a": "y"}', '{"a": "z"}'
PAUSE = 0.15


class ReadClock(Clock):
    """The client's, which it reads once at the start of a request and with each part it gets."""

    readings = 0

    def __call__(self) -> float:
        self.now += 0.001
        read = self.now
        self.readings += 1  # the server may put the clock forward now
        return read


class Gateway:
    """A gateway whose answers depend on the objective; `said` has exceptions by prompt."""

    def __init__(self) -> None:
        self.url = ""
        self.clock = ReadClock()
        self.objective = ""
        self.said: dict[tuple[str, str], str] = {}
        self.stalls = ""  # the objective whose answers pause before their last piece
        self.bodies: list[tuple[str, dict[str, Any]]] = []  # objective, body

    def pieces(self, body: dict[str, Any]) -> list[str]:
        self.bodies.append((self.objective, body))
        asked = body["messages"][-1]["content"]
        text = self.said.get((self.objective, asked), RIGHT)
        return [text[:4], text[4:]]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    stub = Gateway()

    class Answers(Handler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer(200, b'{"data": [{"id": "m"}]}')
            else:
                self.answer(404, b"")

        def do_PATCH(self) -> None:
            stub.objective = self.body()["objective"]
            self.answer(200, b"{}")

        def do_POST(self) -> None:
            pieces = stub.pieces(self.body())
            self.send_response(200)
            self.end_headers()
            readings = -1
            for number, piece in enumerate(pieces):
                # What came before has been read: this piece is not read with it.
                until(lambda seen=readings: stub.clock.readings > seen)  # type: ignore[misc]
                if number and stub.stalls == stub.objective:
                    stub.clock.now += PAUSE
                readings = stub.clock.readings
                self._event({"choices": [{"delta": {"content": piece}}]})
            self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": {"completion_tokens": 6}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    prompts = [
        Prompt(messages=({"role": "user", "content": f"p{number}"},), extra_body=BODY)
        for number in range(6)
    ]
    monkeypatch.setattr(compare_answers, "load_prompts", lambda *_, **__: prompts)
    monkeypatch.setattr(compare_answers, "CELL_SETTLE_S", 0.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=stub.clock))
    with serving(Answers) as stub.url:
        yield stub


def run(
    gateway: Gateway, folder: Path, capsys: pytest.CaptureFixture[str], *given: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and the figures of each method."""
    attach = f"gateway={gateway.url}"
    out = str(folder / "answers.jsonl")
    code = compare_answers.main(["--attach", attach, "--out", out, "--block", "2", *given])
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1])["methods"] if lines else {}


def test_equal_and_valid_answers_are_counted(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(gateway, tmp_path, capsys)
    assert code == 0
    for name in ("off", "adaptive"):
        assert (found[name]["answers"], found[name]["valid"], found[name]["equal"]) == (6, 6, 6)
        assert found[name]["tokens"] == 36
        assert found[name]["over_first_interval"] is not None
    # The methods of a block are asked the same, one after the other.
    asked = [(name, body["messages"][-1]["content"]) for name, body in gateway.bodies]
    for first in range(0, 12, 4):
        methods = {name: [c for n, c in asked[first : first + 4] if n == name] for name, _ in asked}
        assert len(methods) == 2
        for contents in methods.values():
            assert contents == [f"p{first // 2}", f"p{first // 2 + 1}"]
    assert all(body["response_format"] == BODY["response_format"] for _, body in gateway.bodies)


def test_an_invalid_answer_is_named_and_fails(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.said = {("throughput", "p3"): WRONG, ("throughput", "p5"): OTHER}
    code, found = run(gateway, tmp_path, capsys)
    assert code == 1
    drafted = found["adaptive"]
    assert (drafted["valid"], drafted["invalid"], drafted["equal"]) == (5, 1, 4)
    assert drafted["unequal_answers"] == [3, 5]
    assert drafted["invalid_answers"]["3"].startswith("$.a")
    assert (found["off"]["valid"], found["off"]["equal"]) == (6, 6)


def test_a_stall_near_the_end_is_seen(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.stalls = "throughput"
    _, found = run(gateway, tmp_path, capsys)
    assert found["adaptive"]["last_gap_max_ms"] >= 1e3 * PAUSE
    assert found["off"]["last_gap_max_ms"] < 1e3 * PAUSE


def test_a_second_start_answers_what_is_missing(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before = run(gateway, tmp_path, capsys)
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    gateway.bodies.clear()
    _, after = run(gateway, tmp_path, capsys)
    assert len(gateway.bodies) == 2
    assert {name: of["equal"] for name, of in after.items()} == {
        name: of["equal"] for name, of in before.items()
    }


def test_methods_of_two_gateways_are_refused(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(gateway, tmp_path, capsys, "--methods", "none,adaptive")
    assert code == 1
    assert gateway.bodies == []
