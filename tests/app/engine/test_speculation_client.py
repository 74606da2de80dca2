"""The client of the policy that chooses K, with a stand-in for the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from app.engine.heads.generations import SwapError
from app.engine.speculation_client import SpeculationClient, fingerprint
from app.errors import ApiError
from app.settings import load
from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import FIXED, Objective
from drafters.control.policy import Load, Step
from tests.waiting import IN_TIME_S

FINGERPRINT = {"machine": "a", "model": "b"}
LOADED = ("load_calibration", {"cells": []})  # the command of a client without measured costs


class Core:
    """A scheduler without an engine: its steps take what `seconds` says."""

    def __init__(self, k_max: int = 5, lookup_tokens: int = 0) -> None:
        fixed = Objective(FIXED, k=k_max)
        self.policy = Controller(k_max, lookup_tokens=lookup_tokens, objective=fixed)
        self.recent: list[dict[str, Any]] = []
        self.loaded: list[list[float]] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.heads: list[tuple[str, str]] = []  # commands about the head
        self.answers: list[dict[str, Any]] = [{"seconds": 0.002}, {"seconds": 0.004}]

    @staticmethod
    def seconds(requests: int, k: int) -> float:
        return 0.010 + 0.0005 * requests * (1 + k) + (0.002 if k else 0.0)

    def step(self, requests: int, k: int, accepted: int = 1) -> None:
        load = Load(requests, draft_tokens=requests * k)
        took = self.seconds(requests, k)
        counts = [requests if i < k else 0 for i in range(self.policy.k_max)]
        right = [requests if i < min(k, accepted) else 0 for i in range(self.policy.k_max)]
        made = requests * (1 + min(k, accepted))
        self.policy.observe(Step(load, k, took, made, tuple(counts), tuple(right)))
        self.recent.append(
            {
                "k": k, "seconds": took,
                "load": {"requests": requests, "draft_tokens": requests * k, "prefill_tokens": 0},
            }
        )  # fmt: skip

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.commands.append((command, arguments))
        if command == "recent":
            return {"steps": self.recent}
        if command == "load_calibration":
            self.loaded = arguments["cells"]
            self.policy.load_calibration(Cell(*cell) for cell in self.loaded)
        if command == "steer":
            self.policy.set_objective(Objective(**arguments))
        if command == "head_changed":
            self.policy.head_changed()
        return self.policy.snapshot()

    async def head(self, command: str, folder: str) -> list[dict[str, Any]]:
        self.heads.append((command, folder))
        return self.answers

    async def run_dummy_batch(self, requests: int, tokens: int) -> None:
        self.recent.clear()
        for _ in range(3):
            self.step(requests, self.policy.choose(Load(requests)))


def speculation_client(core: Core, clock: Any = None, **settings: Any) -> SpeculationClient:
    given = {"calibration_s": 0, "k": core.policy.k_max, **settings}
    asked = load(given, {}, preset="embedded")
    return SpeculationClient(core, asked, FINGERPRINT, **({"clock": clock} if clock else {}))


def test_costs_are_measured_before_the_objective_holds() -> None:
    core = Core()
    asyncio.run(speculation_client(core, calibration_s=10).begin(max_requests=16))
    measured = {(int(n), k): seconds for n, k, seconds, _ in core.loaded}
    assert {(1, 0), (16, 0), (1, 5), (16, 5)} <= set(measured)
    assert measured[16, 5] == pytest.approx(core.seconds(16, 5))
    assert core.commands[-1] == ("steer", {"objective": "throughput"})


def test_what_was_measured_once_is_not_measured_again(tmp_path: Path) -> None:
    file = str(tmp_path / "costs.json")
    first, second, other = Core(), Core(), Core()
    asyncio.run(speculation_client(first, calibration_s=10, calibration_file=file).begin(8))
    asyncio.run(speculation_client(second, calibration_s=10, calibration_file=file).begin(8))
    assert second.loaded == first.loaded
    assert [name for name, _ in second.commands] == ["load_calibration", "steer"]
    elsewhere = SpeculationClient(
        other, load({"calibration_s": 10, "calibration_file": file}, {}), {"machine": "c"}
    )
    asyncio.run(elsewhere.begin(8))
    assert "recent" in [name for name, _ in other.commands]  # another machine: measured anew


def test_what_the_warm_up_taught_is_dropped_without_measured_costs() -> None:
    """The fault: nothing was loaded then, and no user sent those steps."""
    core = Core()
    client = speculation_client(core, calibration_s=0)

    async def scenario() -> None:
        for begin in (lambda: client.begin(8), lambda: client.resume(core)):
            for _ in range(3):
                core.step(1, 5, accepted=0)
            await begin()
            state = await client.state()
            assert not sum(state["totals"]["steps"]) and not state["costs"]
            assert core.policy.acceptance.conditional() == Core().policy.acceptance.conditional()
            assert core.policy.choose(Load(1)) == 5, "service begins with the largest K"

    asyncio.run(scenario())


def test_a_calibration_that_is_given_up_leaves_nothing_waiting() -> None:
    """Not even a thread, which the end of the process would wait for."""

    class Stuck(Core):
        async def run_dummy_batch(self, requests: int, tokens: int) -> None:
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()

    async def scenario() -> None:
        beginning = asyncio.create_task(speculation_client(Stuck(), calibration_s=10).begin(8))
        await reached.wait()
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), IN_TIME_S)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "steered"),
    [
        ({"objective": "off"}, {"objective": "off"}),
        ({"objective": "fixed", "k": 3}, {"objective": "fixed", "k": 3}),
        ({"objective": "latency", "tpot_s": 0.02}, {"objective": "latency", "tpot_s": 0.02}),
    ],
)
def test_the_objective_of_the_settings_is_set(
    settings: dict[str, Any], steered: dict[str, Any]
) -> None:
    core = Core()
    asyncio.run(speculation_client(core, **settings).begin(8))
    assert core.commands == [LOADED, ("steer", steered)]


def test_a_change_that_makes_no_sense_is_a_400_that_names_the_field() -> None:
    for changes, field in (
        ({"objective": "fast"}, "objective"),
        ({"objective": "fixed", "k": 99}, "k"),
        ({"objective": "latency", "tpot_s": -1.0}, "tpot_s"),
    ):
        with pytest.raises(ApiError) as caught:
            asyncio.run(speculation_client(Core()).steer(changes))
        assert (caught.value.status, caught.value.param) == (400, field)


def test_the_speed_up_is_of_its_window_alone() -> None:
    now = [0.0]
    core = Core()
    client = speculation_client(core, clock=lambda: now[0])
    client.sample(core.policy.snapshot())
    assert client.speedup(60) is None
    for _ in range(40):  # plain steps first: nothing is gained
        core.step(4, 0)
    now[0] = 100.0
    client.sample(core.policy.snapshot())
    assert client.speedup(900) == pytest.approx(1.0)
    for _ in range(40):
        core.step(4, 5, accepted=5)
    now[0] = 150.0
    client.sample(core.policy.snapshot())
    # Six tokens in one step instead of one in each of six.
    gained = 6 * core.seconds(4, 0) / core.seconds(4, 5)
    assert client.speedup(60) == pytest.approx(gained, rel=0.05)
    assert 1.0 < (client.speedup(900) or 0) < gained


def test_counters_grow_by_what_is_new_and_survive_another_engine() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    core = Core()
    client = speculation_client(core, objective="fixed", k=5)
    asyncio.run(client.begin(8))
    names = (
        ("aerie_steps_total", {"k": "5"}),
        ("aerie_steps_k_total", {}),
        ("aerie_drafts_accepted_total", {"position": "1"}),
    )
    before = [value(name, **labels) for name, labels in names]
    core.step(3, 5, accepted=2)
    asyncio.run(client.state())
    asyncio.run(client.state())  # nothing new
    assert [value(n, **ls) - b for (n, ls), b in zip(names, before, strict=True)] == [1, 5, 3]
    core = Core()
    asyncio.run(client.resume(core))
    core.step(2, 5, accepted=1)
    asyncio.run(client.steer({"k": 5}))
    assert [value(n, **ls) - b for (n, ls), b in zip(names, before, strict=True)] == [2, 10, 5]
    assert value("aerie_objective", objective="fixed") == 1
    assert value("aerie_objective", objective="throughput") == 0


def test_the_next_engine_is_told_what_the_last_one_knew() -> None:
    """Also that K was pinned by an operator since."""
    first, second, third = Core(), Core(), Core()

    async def scenario() -> None:
        client = speculation_client(first, calibration_s=10)
        await client.begin(8)
        await client.steer({"objective": "fixed", "k": 2})
        await client.steer({"k": 3})
        client.sample(await client.state())
        await client.resume(second)
        assert second.loaded == first.loaded
        assert second.commands[-1] == ("steer", {"objective": "fixed", "k": 3})
        assert "recent" not in [name for name, _ in second.commands], "measured again"
        assert client.speedup(60.0) is None, "the last engine's seconds"
        await client.steer({"objective": "throughput"})
        await client.resume(third)
        assert third.commands[-1] == ("steer", {"objective": "throughput"})

    asyncio.run(scenario())


def test_sources_hold_until_they_are_changed_and_for_the_next_engine() -> None:
    first, second = Core(lookup_tokens=8), Core(lookup_tokens=8)

    async def scenario() -> None:
        client = speculation_client(first)
        await client.begin(8)
        assert (await client.state())["sources"] == ["head", "lookup"]
        assert (await client.steer({"sources": ["lookup"]}))["sources"] == ["lookup"]
        await client.steer({"objective": "fixed", "k": 2})
        await client.steer({"objective": "throughput"})
        await client.resume(second)
        holds = {"objective": "throughput", "sources": ["lookup"]}
        assert second.commands[-1] == ("steer", holds)
        assert (await client.steer({"sources": []}))["sources"] == ["head", "lookup"]
        assert second.commands[-1] == ("steer", {"objective": "throughput"})

    asyncio.run(scenario())


@pytest.mark.parametrize("sources", [["lookup"], ["tree"], ["head", "head"], [3]])
def test_sources_that_the_engine_does_not_have_are_refused(sources: list[Any]) -> None:
    async def scenario() -> None:
        client = speculation_client(Core())
        await client.begin(8)
        with pytest.raises(ApiError) as caught:
            await client.steer({"sources": sources})
        assert (caught.value.status, caught.value.param) == (400, "sources")

    asyncio.run(scenario())


class GatedCore(Core):
    """Carries out commands in their order while `gate` is open, also those whose caller has left.

    Without `delivers` it never gets them.
    """

    def __init__(self, delivers: bool = True) -> None:
        super().__init__()
        self.gate, self._turn, self._delivers = asyncio.Event(), asyncio.Lock(), delivers

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if not self._delivers and not self.gate.is_set():
            await asyncio.Event().wait()
        return await asyncio.shield(self._carry_out(command, arguments))

    async def _carry_out(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            await self.gate.wait()
            return await super().speculation(command, arguments)


def test_changes_at_the_same_time_build_on_each_other() -> None:
    async def scenario() -> None:
        core = GatedCore()
        client = speculation_client(core)
        changes: tuple[dict[str, Any], ...] = (
            {"objective": "latency", "tpot_s": 0.02},
            {"tpot_s": 0.03},
            {"objective": "fixed", "k": 2},
            {"k": 3},
        )
        asked = [asyncio.create_task(client.steer(change)) for change in changes]
        await asyncio.sleep(0.01)
        core.gate.set()
        states = await asyncio.gather(*asked)
        assert [state["tpot_s"] for state in states] == [0.02, 0.03, None, None]
        assert [state["k"] for state in states[2:]] == [2, 3]

    asyncio.run(scenario())


def test_a_change_does_not_wait_for_everybody_who_reads_the_state() -> None:
    """The fault: each reader had a call of its own, one behind the other, and the change came last.
    Readers that leave take the state from no other."""

    async def scenario() -> None:
        core = GatedCore()
        client = speculation_client(core)
        readers = [asyncio.create_task(client.state()) for _ in range(50)]
        changing = asyncio.create_task(client.steer({"objective": "off"}))
        await asyncio.sleep(0.01)
        readers[0].cancel()
        await asyncio.sleep(0.01)
        core.gate.set()
        assert (await changing)["objective"] == "off"
        assert [command for command, _ in core.commands] == ["state", "steer"]
        assert len(await asyncio.gather(*readers[1:])) == 49
        assert (await client.state())["objective"] == "off"

    asyncio.run(scenario())


def test_who_reads_the_state_of_the_next_engine_does_not_wait_for_the_last_one() -> None:
    async def scenario() -> None:
        client = speculation_client(GatedCore(delivers=False))
        reading = asyncio.create_task(client.state())
        await asyncio.sleep(0.01)
        await client.resume(Core())
        assert (await asyncio.wait_for(client.state(), IN_TIME_S))["objective"] == "throughput"
        reading.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("objective", ["fixed", "latency", "off"])
@pytest.mark.parametrize("delivers", [True, False])
@pytest.mark.parametrize("then", ["poll", "change"])
def test_a_change_that_nobody_waited_for_is_known_once_the_engine_tells(
    objective: str, delivers: bool, then: str
) -> None:
    """Made or not: the next change builds on what holds, and the next engine gets it."""
    values: dict[str, Any] = {"fixed": {"k": 2}, "latency": {"tpot_s": 0.02}}.get(objective, {})

    async def scenario() -> None:
        first, second = GatedCore(delivers), Core()
        client = speculation_client(first)
        first.gate.set()
        await client.begin(8)
        first.gate.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.steer({"objective": objective, **values}), 0.01)
        first.gate.set()
        holds = {"objective": objective, **values} if delivers else {"objective": "throughput"}
        if then == "poll":
            state = await client.state()
            assert state["objective"] == holds["objective"]
        elif holds.get("k") is not None:
            holds["k"] = (await client.steer({"k": 3}))["k"]
            assert holds["k"] == 3
        else:
            await client.steer({"objective": holds["objective"]})
        await client.resume(second)
        assert second.commands == [LOADED, ("steer", holds)]

    asyncio.run(scenario())


def test_the_log_says_why_drafts_are_made_or_not_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    client = speculation_client(Core(), clock=lambda: now[0])
    state = {"totals": {"decode_seconds": 0.0, "plain_seconds": 0.0}}
    with caplog.at_level("INFO", logger="app.engine.speculation_client"):
        for seconds, requests, k in (
            (0, 0, 5),
            (1, 2, 5),
            (2, 2, 3),
            (30, 2, 0),
            (61, 2, 0),
            (62, 2, 0),
            (63, 2, 5),
        ):
            now[0] = float(seconds)
            why = f"why {k} at {seconds}"
            client.sample({**state, "batch": requests, "batch_k": k, "why": why})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["speculation: why 5 at 1", "speculation: why 0 at 61"]


def test_the_latest_state_asks_nobody() -> None:
    """The page shows it once a second to everybody who looks."""

    async def scenario() -> None:
        core = Core()
        client = SpeculationClient(core, load({"calibration_s": "0"}, {}), FINGERPRINT)
        assert client.latest() is None
        core.step(2, 3)
        state = await client.state()
        asked = len(core.commands)
        assert client.latest() == state
        assert len(core.commands) == asked

    asyncio.run(scenario())


def drafted_by(generation: int) -> float | None:
    return REGISTRY.get_sample_value(
        "aerie_head_drafts_verified_total", {"generation": str(generation)}
    )


def test_drafts_are_counted_for_the_head_that_made_them() -> None:
    """A draft is one of a request in a step, of whatever K."""
    core = Core()
    client = speculation_client(core)

    async def swaps() -> float:
        await client.state()
        core.step(4, 1, accepted=1)
        pause = await client.swap_head("/generations/0041", 41)
        core.step(4, 5, accepted=3)
        core.step(4, 5, accepted=3)
        await client.swap_head("", 40)
        core.step(4, 5, accepted=0)
        await client.state()
        return pause

    assert asyncio.run(swaps()) == 0.004, "the longest of all engine cores"
    assert core.heads == [
        ("stage", "/generations/0041"), ("swap", "/generations/0041"), ("stage", ""), ("swap", ""),
    ]  # fmt: skip
    assert client.drafts.rows() == [
        {"generation": 0, "drafts": 4, "accepted": 4},
        {"generation": 40, "drafts": 4, "accepted": 0},
        {"generation": 41, "drafts": 8, "accepted": 24},
    ]
    assert (drafted_by(40), drafted_by(41)) == (4.0, 8.0)


def test_generations_that_drafted_long_ago_have_no_metrics() -> None:
    core = Core()
    client = speculation_client(core)

    async def swaps() -> None:
        for number in range(100, 120):
            await client.swap_head(f"/generations/{number}", number)
            core.step(1, 5)
        await client.state()

    asyncio.run(swaps())
    assert [row["generation"] for row in client.drafts.rows()] == list(range(112, 120))
    assert drafted_by(111) is None
    assert drafted_by(119) == 1.0


def test_a_refused_head_is_not_swapped_in() -> None:
    core = Core()
    core.answers = [{"seconds": 0.1}, {"error": "fc.weight has 1 values that are not finite"}]
    client = speculation_client(core)
    with pytest.raises(SwapError, match="not finite"):
        asyncio.run(client.swap_head("/generations/0001", 1))
    assert core.heads == [("stage", "/generations/0001")]
    assert client.drafts.generation == 0


def test_a_new_head_is_believed_what_the_old_one_showed_until_it_shows_more() -> None:
    core = Core()
    client = speculation_client(core)
    for _ in range(100):
        core.step(8, 5, accepted=5)
    before = core.policy.acceptance.conditional()
    asyncio.run(client.swap_head("/generations/0001", 1))
    assert core.policy.acceptance.conditional() == pytest.approx(before, rel=0.1)
    for _ in range(20):  # a second of service
        core.step(8, 5, accepted=0)
    assert core.policy.acceptance.conditional()[0] < 0.35


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "v2"},
        {"quantization": "fp8_per_tensor"},
        {"enforce_eager": "true"},
        {"lookup_k": "3"},
        {"engine_args": '{"kv_cache_dtype": "fp8"}'},
    ],
)
def test_costs_of_another_engine_are_not_taken_over(change: dict[str, str]) -> None:
    given = {"model": "org/target", "drafter": "org/head"}
    assert fingerprint(load({**given, **change}, {}), {}) != fingerprint(load(given, {}), {})


def test_the_order_of_engine_arguments_is_no_other_engine_and_none_is_written_down() -> None:
    texts = ('{"hf_token": "secret", "block_size": 64}', '{"block_size": 64, "hf_token": "secret"}')
    one, other = (fingerprint(load({"engine_args": text}, {}), {}) for text in texts)
    assert one == other
    assert "secret" not in str(one)


def test_costs_of_another_processor_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: Python has no name for a processor on Linux, so that all were one."""
    settings, found = load({"model": "org/target", "drafter": "org/head"}, {}), []
    for name in ("AMD EPYC 9B45", "Intel Xeon"):
        monkeypatch.setattr("app.engine.speculation_client.cpu_name", lambda name=name: name)
        found.append(fingerprint(settings, {}))
    assert found[0] != found[1]
