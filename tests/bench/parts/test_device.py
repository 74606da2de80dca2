"""`aerie bench device`: which steps are timed, and the tables of their times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.parts.device import FEWEST, Clock, figures, main, tables, watch
from bench.systems.method import parse


class Stream:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def milliseconds(self, since: float, until: float) -> float:
        return until - since

    def wait(self) -> None: ...


def scheduled(tokens: dict[str, int], new: list[str], reading: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    """As much of a SchedulerOutput as is looked at."""
    old = [name for name in tokens if name not in new]
    cached = SimpleNamespace(req_ids=old, is_context_phase=reading.__contains__)
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()), num_scheduled_tokens=tokens,
        scheduled_new_reqs=new, scheduled_cached_reqs=cached,
    )  # fmt: skip


class Runner:
    """V1's two calls: a step takes 7 and its drafter 2."""

    def __init__(self, clock: Stream) -> None:
        self.clock = clock

    def execute_model(self, output: Any) -> None:
        self.clock.now += 5
        self.propose_draft_token_ids()

    def propose_draft_token_ids(self) -> None:
        self.clock.now += 2


def test_steps_and_their_drafters_are_timed_apart() -> None:
    clock: Any = Stream()
    runner = Runner(clock)
    steps = watch(runner, clock)
    runner.execute_model(scheduled({"a": 9, "b": 9}, ["a", "b"]))
    for _ in range(FEWEST + 1):
        runner.execute_model(scheduled({"a": 4, "b": 4}, []))
    found = figures(steps, clock, batch=2, k=3)
    assert found == {"k": 3, "steps": FEWEST, "step_ms": 7.0, "draft_ms": 2.0}


@pytest.mark.parametrize(
    "other",
    [
        scheduled({"a": 4, "b": 4}, ["b"]),  # a prompt as long as a decode
        scheduled({"a": 4, "b": 4}, [], {"b"}),  # the rest of one
        scheduled({"a": 4, "b": 3}, []),  # fewer drafts
        scheduled({"a": 8}, []),  # as many tokens, of one request
    ],
)
def test_other_steps_and_those_before_them_count_for_nothing(other: Any) -> None:
    clock: Any = Stream()
    runner = Runner(clock)
    steps = watch(runner, clock)
    for _ in range(3):
        runner.execute_model(scheduled({"a": 4, "b": 4}, []))
        runner.execute_model(other)
    assert figures(steps, clock, batch=2, k=3) == {"k": 3, "steps": 0}


def test_on_v2_the_speculator_is_watched_and_nothing_where_there_is_none() -> None:
    clock: Any = Stream()

    class Speculator:
        def propose(self) -> str:
            clock.now += 3
            return "drafts"

    runner: Any = SimpleNamespace(execute_model=lambda output: None, speculator=Speculator())
    steps = watch(runner, clock)
    runner.execute_model(scheduled({"a": 4}, []))
    assert runner.speculator.propose() == "drafts"
    assert steps[0].draft_ended - steps[0].draft_begun == 3
    plain: Any = SimpleNamespace(execute_model=lambda output: None, speculator=None)
    watch(plain, clock)


def test_a_cpu_s_marks_are_times() -> None:
    clock = Clock(torch.device("cpu"))
    since = clock.mark()
    assert clock.milliseconds(since, since + 0.5) == pytest.approx(500)
    clock.wait()


def test_ratios_are_over_vllm_at_the_same_k_and_over_no_head() -> None:
    methods = parse("none,plain,vllm:3,off,k:3,k:7")
    cells = {
        (name, 8): {"step_ms": ms, "draft_ms": 1.5}
        for name, ms in {
            "none": 5,
            "plain": 4,
            "vllm:3": 10,
            "off": 4.04,
            "k:3": 8,
            "k:7": 9,
        }.items()
    }
    *_, eight, nothing = tables(methods, [8, 32], cells)
    assert parts(eight) == ["8", "", "0.800", "", "1.010", "0.800", ""]
    assert parts(nothing) == ["32", *6 * [""]]


def test_our_eagle3_is_held_against_vllm_s() -> None:
    """Catches: a ratio over vLLM's P-EAGLE, whose pass is another one."""
    methods = parse("eagle3:3,vllm:3,ours-eagle3:3,k:3")
    milliseconds = {"eagle3:3": 10.0, "vllm:3": 5.0, "ours-eagle3:3": 9.0, "k:3": 4.0}
    cells = {(name, 1): {"step_ms": ms} for name, ms in milliseconds.items()}
    *_, row = tables(methods, [1], cells)
    assert parts(row) == ["1", "", "", "0.900", "0.800"]


def test_a_table_without_figures_is_left_out() -> None:
    """As in the check of a GPU, whose parts have one engine each."""
    lines = tables(parse("off,k:3"), [1], {("k:3", 1): {"step_ms": 2.0}})
    assert lines[0].startswith("A step, ms") and len(lines) == 4
    assert tables(parse("off"), [1], {}) == []


def parts(row: str) -> list[str]:
    return [part.strip() for part in row.strip("|").split("|")]


def test_adaptive_k_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["--methods", "off,adaptive", "--out", str(tmp_path / "x.jsonl")]) == 1
    assert "adaptive" in capsys.readouterr().err
