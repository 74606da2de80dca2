"""A steady number of users on one engine, and what is said of their tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_check import adaptive
from bench.gpu_check.adaptive import SteadyUsers, says, table
from bench.gpu_check.part_report import PartReport


class Engine:
    """Gives two tokens a step to each request, and counts a step of K = 3. A step takes 1 s."""

    def __init__(self) -> None:
        self.now, self.most, self.steps = 0.0, 0, [0, 0, 0, 0]
        self.running: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.steered: list[dict[str, Any]] = []
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        self.running[name], self.lengths[name] = [], sampling.max_tokens

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def step(self) -> list[Any]:
        self.now += 1.0
        self.steps[3] += 1
        self.most = max(self.most, len(self.running))
        outputs = []
        for name, tokens in list(self.running.items()):
            tokens += [7, 7]
            finished = len(tokens) >= self.lengths[name]
            made = SimpleNamespace(token_ids=tokens)
            outputs.append(SimpleNamespace(request_id=name, outputs=[made], finished=finished))
            if finished:
                del self.running[name]
        return outputs

    def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if command == "steer":
            self.steered.append(arguments)
        return {"totals": {"steps": self.steps}}


def test_as_many_requests_are_in_flight_as_there_are_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    engine = Engine()
    monkeypatch.setattr("bench.gpu_check.adaptive.perf_counter", lambda: engine.now)
    users = SteadyUsers(SimpleNamespace(llm_engine=engine))
    cell = users.drive(8, 100.0, {"objective": "off"})
    assert cell == {
        "seconds": 100.0, "tokens": 1600, "tokens_per_second": 16.0, "steps_by_k": {3: 100},
    }  # fmt: skip
    assert engine.most == 8 and len(engine.lengths) > 8  # the next began where one had ended
    cell = users.drive(1, 10.0, {"objective": "throughput"})
    assert cell["tokens_per_second"] == 2.0 and cell["steps_by_k"] == {3: 10}
    assert len(engine.running) <= 1
    assert engine.steered == [{"objective": "off"}, {"objective": "throughput"}]


def test_adaptive_k_is_compared_with_the_better_of_the_others_in_each_phase() -> None:
    speeds = {"adaptive": (190.0, 990.0), "K=0": (100.0, 900.0), "K=7": (200.0, 600.0)}
    cells = [
        {"objective": name, "phase": phase, "users": users, "tokens_per_second": speed[phase],
         "steps_by_k": {0: 1, 7: 3}}
        for name, speed in speeds.items()
        for phase, users in enumerate((1, 64))
    ]  # fmt: skip
    assert says(cells).endswith(": 0.95 at 1, 1.10 at 64 users")
    lines = table(cells)
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "1", "190", "100", "200", "0: 25%, 7: 75%",
    ]  # fmt: skip
    # A part that is ended for time has adaptive K first, then what it can be compared with.
    assert says(cells[:2]) == "" and len(table(cells[:2])) == 4
    assert says(cells[:4]).endswith("better of K=0: 1.90 at 1, 1.10 at 64 users")


def test_each_round_is_shown_and_adaptive_k_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a part that is ended for time has K = 0 and K = 7, and no adaptive K."""
    driven: list[dict[str, Any]] = []
    shown: list[list[str]] = []

    class Users:
        def __init__(self, llm: Any) -> None: ...

        def drive(self, users: int, seconds: float, changes: dict[str, Any]) -> dict[str, Any]:
            driven.append(changes)
            shown.append([c["objective"] for c in report.document["results"].get("cells", [])])
            return {"tokens_per_second": 10.0, "steps_by_k": {0: 1}}

    monkeypatch.setattr(adaptive, "SteadyUsers", Users)
    monkeypatch.setattr(adaptive, "in_process", lambda *_: ({}, {}))
    monkeypatch.setattr(adaptive, "started", lambda _: (None, {}))
    monkeypatch.setattr(adaptive, "start_table", lambda _: [])
    report = PartReport(tmp_path / "adaptive.json", "adaptive", "cpu")
    adaptive.run(report)
    objectives = [changes["objective"] for changes in driven]
    assert objectives == [name for name in ("throughput", "throughput", "off", "fixed")
                          for _ in range(3)]  # fmt: skip
    assert shown[3] == [] and shown[6] == ["adaptive"] * 3  # those of the first round do not count
    header, _, *rows = report.document["table"]
    assert header.index("adaptive") < header.index("K=0") and len(rows) == 3
