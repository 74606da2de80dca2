"""Generations in service: what is loaded at the start, pins, trials, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from app.engine.heads import generations
from app.engine.heads.generations import HeadGenerations, SwapError
from app.engine.heads.trial import TrialPlan
from app.errors import ApiError
from app.observability import metrics
from drafters.learning.lineage import CANDIDATE, KEPT, REFUSED, ROLLED_BACK, SERVICE, Lineage
from tests.waiting import soon

IN_TIME_S = 10.0
PLAN = TrialPlan(period_s=2.0, settle_s=0.5, looks=(3, 6), undrafted_s=20.0)


class FakeEngine:
    """An engine that decodes a second between two looks, and refuses what it is told to."""

    def __init__(self) -> None:
        self.in_force = 0
        self.swaps: list[int] = []
        self.refused: dict[int, str] = {}
        self.speedups: dict[int, float] = {}
        self.dead = False
        self.swapping: asyncio.Event | None = None  # a swap waits for it
        self.random = Random(0)
        self.totals = {"decode_seconds": 0.0, "plain_seconds": 0.0, "tokens": 0.0}
        self.drafted = 0
        self.steps = [0, 0]  # at K = 0, and above
        self.drafts = True  # or K = 0 is in force
        self.staged = 0

    async def swap_head(self, folder: str, generation: int) -> float:
        if self.swapping is not None:
            await self.swapping.wait()
        if self.dead:
            raise ApiError(503, "gone")
        if generation in self.refused:
            raise SwapError(self.refused[generation])
        if generation:
            if not (Path(folder) / "config.json").exists():
                raise SwapError(f"{folder}: there is no config.json")
        else:
            assert folder == ""
        self.in_force = generation
        self.swaps.append(generation)
        self.staged += 1
        return 0.01

    async def drop_head(self) -> None:
        self.staged = 0

    def latest(self) -> dict[str, Any]:
        self.totals["decode_seconds"] += 1.0
        pace = self.speedups.get(self.in_force, 1.0) * self.random.gauss(1.0, 0.02)
        self.totals["plain_seconds"] += pace
        self.totals["tokens"] += 60.0
        self.drafted += 100
        self.steps[self.drafts] += 20
        sources = {"head": {"drafted": self.drafted, "accepted": 0}}
        totals = {**self.totals, "steps": list(self.steps), "sources": sources}
        return {"objective": "throughput", "k": 5, "tpot_s": None, "totals": totals}


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lineage = folder, Lineage(folder)
        self.engine = FakeEngine()
        self.first_head = "a target and a head"
        self.heads = HeadGenerations(folder, lambda: self.first_head, Random(2), PLAN)

    def add(self, verdict: str = CANDIDATE, against: int = 0) -> int:
        head = self.folder / "new"
        head.mkdir()
        (head / "config.json").write_text("{}")
        facts = {"verdict": verdict, "parent": against, "replay": {"against": against}}
        return self.lineage.add(head, facts).number

    def trial_of(self, number: int) -> Mapping[str, Any]:
        """What the trial of a generation came to."""
        trial = self.lineage.generation(number).trial
        assert trial is not None
        return trial

    def play(self, *acts: Callable[[], Awaitable[None] | None]) -> None:
        async def run() -> None:
            await self.heads.begin(self.engine)
            following = asyncio.create_task(self.heads.run())
            try:
                for act in acts:
                    if (waiting := act()) is not None:
                        await waiting
            finally:
                assert not following.done(), following
                following.cancel()

        asyncio.run(run())

    def until(self, happened: Callable[[], bool]) -> Callable[[], Awaitable[None]]:
        async def wait() -> None:
            await soon(happened, IN_TIME_S)

        return wait

    def looks(self, count: int = 20) -> Callable[[], Awaitable[None]]:
        """Wait until so many looks at the folder are through, and another has begun."""

        async def wait() -> None:
            begun, look = list[int](), self.heads._view

            async def counted() -> Any:
                begun.append(1)
                return await look()

            self.heads._view = counted  # type: ignore[method-assign]
            await soon(lambda: len(begun) > count, IN_TIME_S)
            self.heads._view = look  # type: ignore[method-assign]

        return wait


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(generations, "POLL_S", 0.003)
    return Scene(tmp_path)


def test_nothing_happens_without_generations(scene: Scene) -> None:
    scene.play(scene.looks())
    assert scene.engine.swaps == []
    assert scene.heads.state() == {
        "generation": 0, "pinned": None, "learned": False, "trial": None, "problem": None,
    }  # fmt: skip


def test_the_generation_in_force_is_loaded_at_the_start(scene: Scene) -> None:
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.play(scene.looks())
    assert scene.engine.swaps == [1]
    assert scene.heads.state()["learned"]
    assert scene.engine.staged == 0, "what it replaced takes no memory"


def test_a_better_candidate_is_kept(scene: Scene) -> None:
    scene.engine.speedups = {1: 1.4}
    scene.add()
    scene.play(
        scene.until(lambda: scene.heads.trial is not None),
        scene.until(lambda: scene.lineage.in_force() == 1),
        scene.until(lambda: scene.heads.trial is None and scene.engine.in_force == 1),
        scene.looks(),
    )
    trial = scene.trial_of(1)
    assert (trial["verdict"], trial["by"]) == (KEPT, SERVICE)
    assert trial["against"] == 0
    assert trial["ratio"] == pytest.approx(1.4, rel=0.05)
    assert scene.engine.in_force == 1
    assert scene.engine.staged == 0
    assert scene.heads.trial is None


def test_a_worse_candidate_is_rolled_back_and_not_tried_again(scene: Scene) -> None:
    scene.engine.speedups = {1: 0.8}
    scene.add()
    scene.play(
        scene.until(lambda: scene.lineage.generation(1).trial is not None),
        scene.until(lambda: scene.engine.in_force == 0),
        scene.looks(),
    )
    assert scene.lineage.generation(1).verdict == ROLLED_BACK
    assert scene.trial_of(1)["by"] == SERVICE
    assert scene.lineage.in_force() == 0
    assert scene.heads.trial is None


@pytest.mark.parametrize("drafts", [True, False])
def test_a_candidate_that_service_does_not_show_to_be_worse_is_kept_by_the_replay(
    scene: Scene, drafts: bool
) -> None:
    """With drafts after the last look, at K = 0 after some time: the learner waits for it."""
    scene.engine.drafts = drafts
    ended = metrics.HEAD_TRIALS.labels("kept_by_replay")
    before = ended._value.get()
    scene.add()
    scene.play(
        scene.until(lambda: scene.lineage.generation(1).trial is not None),
        scene.until(lambda: scene.heads.trial is None and scene.engine.in_force == 1),
        scene.looks(),
    )
    generation = scene.lineage.generation(1)
    assert (generation.verdict, generation.kept_by_replay) == (KEPT, True)
    assert scene.trial_of(1)["pairs"] == (PLAN.looks[-1] if drafts else 0)
    assert scene.lineage.in_force() == 1
    assert ended._value.get() == before + 1


def test_a_candidate_that_was_replayed_against_another_head_has_to_be_better(scene: Scene) -> None:
    """Generation 0 was pinned while it was made."""
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.add(against=0)
    scene.play(
        scene.until(lambda: scene.lineage.generation(2).trial is not None),
        scene.until(lambda: scene.engine.in_force == 1),
    )
    trial = scene.trial_of(2)
    assert (trial["verdict"], trial["by"], trial["against"]) == (ROLLED_BACK, SERVICE, 1)
    assert trial["pairs"] == PLAN.looks[-1]
    assert scene.lineage.in_force() == 1


def test_the_newest_candidate_is_tried_and_older_ones_are_not(scene: Scene) -> None:
    scene.engine.speedups = {2: 1.4}
    scene.add()
    scene.add()
    scene.play(scene.until(lambda: scene.lineage.in_force() == 2), scene.looks())
    assert 1 not in scene.engine.swaps
    assert scene.lineage.generation(1).verdict == CANDIDATE


def test_a_candidate_that_is_refused_is_rolled_back(scene: Scene) -> None:
    scene.engine.refused = {1: "hidden_size is 3"}
    scene.add()
    scene.play(scene.until(lambda: scene.lineage.generation(1).trial is not None), scene.looks())
    trial = scene.trial_of(1)
    assert (trial["verdict"], trial["refused"]) == (ROLLED_BACK, "hidden_size is 3")
    assert "by" not in trial
    assert scene.engine.in_force == 0


@pytest.mark.parametrize("how", ["refused", "no weights"])
def test_a_broken_generation_leaves_the_first_head(scene: Scene, how: str) -> None:
    number = scene.add(KEPT)
    scene.lineage.put_in_force(number)
    folder = scene.lineage.generation(number).folder
    if how == "refused":
        scene.engine.refused = {number: f"{folder}: truncated: {folder}/model.safetensors"}
    else:
        (folder / "config.json").unlink()
    scene.play(scene.looks())
    assert scene.engine.in_force == 0
    reason = "truncated" if how == "refused" else "weights are gone"
    assert f"generation {number} cannot be loaded, generation 0 drafts" in scene.heads.problem
    assert reason in scene.heads.problem
    assert str(scene.folder) not in scene.heads.problem, "any client may read it"


def test_a_damaged_record_of_one_generation_does_not_stop_the_one_in_force(scene: Scene) -> None:
    for _ in range(3):
        scene.add(KEPT)
    scene.lineage.put_in_force(3)
    (scene.lineage.generation(1).folder / "trial.json").touch()
    (scene.lineage.generation(2).folder / "provenance.json").write_text("")
    scene.play(scene.looks(2))
    assert (scene.engine.in_force, scene.heads.problem) == (3, None)
    assert [item.number for item in scene.lineage.generations()] == [1, 3]


def test_a_file_of_the_folder_that_is_damaged_is_named(scene: Scene) -> None:
    (scene.folder / "in_force").touch()
    scene.play(scene.looks(2))
    assert "in_force is damaged" in scene.heads.problem
    assert str(scene.folder) not in scene.heads.problem, "any client may read it"


def test_a_generation_in_force_that_was_removed_leaves_the_first_head(scene: Scene) -> None:
    number = scene.add(KEPT)
    scene.lineage.put_in_force(number)
    shutil.rmtree(scene.lineage.generation(number).folder)
    scene.play(scene.looks())
    assert (scene.engine.in_force, scene.heads.problem) == (0, None)


def test_another_head_at_the_start_is_not_overridden_by_what_the_old_one_learned(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.play(scene.looks(2))
    assert scene.engine.in_force == 1
    again = Scene(scene.folder)  # of another process
    again.first_head = "a target and a better head"
    again.play(again.looks(2))
    assert (again.engine.swaps, again.lineage.in_force()) == ([], 0)
    assert "another head or target" in caplog.text
    again.lineage.put_in_force(1)  # as a trial would
    again.engine = FakeEngine()
    again.play(again.looks(2))
    assert again.engine.in_force == 1


def test_a_candidate_that_ends_the_engine_is_rolled_back(scene: Scene) -> None:
    """It would end the next engine too, and the next gateway's."""
    scene.add()
    old = scene.engine

    async def die() -> None:
        old.swapping = asyncio.Event()
        await soon(lambda: scene.heads._loading == 1, IN_TIME_S)
        old.dead = True
        old.swapping.set()
        await scene.looks(1)()
        scene.engine = FakeEngine()

    scene.play(die)
    scene.play(scene.until(lambda: scene.lineage.generation(1).trial is not None), scene.looks())
    assert scene.lineage.generation(1).verdict == ROLLED_BACK
    assert scene.trial_of(1)["refused"] == "the engine ended while it was loaded"
    assert scene.engine.swaps == []


def test_a_pin_that_waits_while_a_candidate_ends_the_engine_is_not_to_blame(scene: Scene) -> None:
    """The fault: the generation that was pinned counted as what had ended the engine, and the
    candidate was loaded into the next one."""
    scene.add()
    pinned = scene.add(KEPT)
    old = scene.engine

    async def die() -> None:
        old.swapping = asyncio.Event()
        await soon(lambda: scene.lineage.loading() == 1, IN_TIME_S)
        pinning = asyncio.create_task(scene.heads.pin(pinned))
        await asyncio.sleep(0.02)
        old.dead = True
        old.swapping.set()
        with pytest.raises(ApiError, match="gone"):
            await pinning
        assert scene.lineage.loading() == 1, "what the next gateway is told"
        scene.engine = FakeEngine()

    scene.play(die)
    scene.play(scene.until(lambda: scene.lineage.generation(1).trial is not None), scene.looks())
    assert scene.trial_of(1)["refused"] == "the engine ended while it was loaded"
    assert scene.engine.swaps == []
    scene.play(lambda: scene.heads.pin(pinned))
    assert scene.engine.swaps == [pinned]


@pytest.mark.parametrize("on_purpose", [False, True])
def test_a_candidate_that_ends_the_gateway_is_rolled_back(scene: Scene, on_purpose: bool) -> None:
    """It would take down each gateway that starts: memory runs out, for one."""
    scene.add()

    async def end() -> None:
        scene.engine.swapping = asyncio.Event()
        await soon(lambda: scene.lineage.loading() == 1, IN_TIME_S)
        if on_purpose:
            scene.heads.stopped()

    scene.play(end)
    again = Scene(scene.folder)  # of another process
    if on_purpose:
        again.play(
            again.until(lambda: 1 in again.engine.swaps),
            again.until(lambda: again.lineage.loading() is None),
        )
    else:
        again.play(again.until(lambda: again.lineage.generation(1).trial is not None))
        assert again.lineage.generation(1).verdict == ROLLED_BACK
        assert again.trial_of(1)["refused"] == "the gateway ended while it was loaded"
        assert again.engine.swaps == []
    assert again.lineage.loading() is None


def test_what_was_loaded_once_is_not_noted_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial swaps every few seconds, and must not write to the disk each time."""
    noted: list[int | None] = []
    monkeypatch.setattr(Lineage, "note_loading", lambda _, number: noted.append(number))
    scene.add()
    scene.play(scene.until(lambda: len(scene.engine.swaps) > 3))
    assert noted == [1, None]


def test_a_disk_that_does_not_answer_keeps_no_engine_from_starting(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "READ_S", 0.05)
    scene.lineage.put_in_force(scene.add(KEPT))
    answers = threading.Event()
    read = scene.heads._read

    def hang() -> Any:
        assert answers.wait(IN_TIME_S)
        return read()

    monkeypatch.setattr(scene.heads, "_read", hang)
    scene.play(answers.set, scene.until(lambda: scene.engine.in_force == 1))


def test_a_first_head_of_many_gigabytes_is_hashed_once_and_before_anything_is_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: hashing took longer than a start waits, and was never repeated. What had ended the
    last gateway was loaded again."""
    monkeypatch.setattr(generations, "READ_S", 0.05)
    scene.lineage.descend_from("a target and a head")
    scene.add()
    scene.lineage.note_loading(1)
    hashed, hashings = threading.Event(), list[str]()

    def hash_slowly() -> str:
        hashings.append(scene.first_head)
        assert hashed.wait(IN_TIME_S)
        return scene.first_head

    scene.heads = HeadGenerations(scene.folder, hash_slowly, Random(2), PLAN)
    scene.play(
        lambda: asyncio.sleep(2 * generations.READ_S),
        hashed.set,
        scene.until(lambda: scene.lineage.generation(1).trial is not None),
    )
    assert scene.trial_of(1)["refused"] == "the gateway ended while it was loaded"
    assert scene.engine.swaps == []
    scene.engine = FakeEngine()
    scene.play(scene.looks(2))
    assert len(hashings) == 1


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_pin_that_cannot_be_written_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.add(KEPT)
    scene.add()

    async def pin() -> None:
        monkeypatch.setattr(Lineage, "pin", full)
        with pytest.raises(ApiError, match="cannot be written: nothing has changed"):
            await scene.heads.pin(1)
        assert scene.engine.in_force != 1
        assert scene.heads.trial is not None

    scene.play(scene.until(lambda: scene.heads.trial is not None), pin, scene.looks(2))
    assert (scene.lineage.pinned(), scene.heads.pinned) == (None, None)


def test_a_pin_holds_over_restarts_and_ends_a_trial(scene: Scene) -> None:
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.add()
    scene.play(
        scene.until(lambda: scene.heads.trial is not None),
        lambda: scene.heads.pin(0),
        scene.looks(),
    )
    assert (scene.engine.in_force, scene.lineage.pinned(), scene.heads.trial) == (0, 0, None)
    assert scene.lineage.generation(2).verdict == CANDIDATE
    scene.engine = FakeEngine()  # a restart: it has the head of its start
    scene.play(scene.looks())
    assert scene.engine.swaps == []
    scene.play(lambda: scene.heads.pin(None), scene.until(lambda: scene.heads.trial is not None))
    assert scene.lineage.pinned() is None
    assert scene.engine.swaps[0] == 1


def test_what_another_process_pins_is_tried_again_and_ends_a_trial(scene: Scene) -> None:
    scene.add(KEPT)
    scene.engine.refused = {1: "truncated"}

    def mend_and_add() -> None:
        scene.engine.refused.clear()
        scene.add()

    scene.play(
        lambda: scene.lineage.pin(1),
        scene.until(lambda: scene.heads.problem is not None),
        lambda: scene.lineage.pin(None),
        mend_and_add,
        scene.until(lambda: scene.heads.trial is not None and scene.engine.staged > 0),
        lambda: scene.lineage.pin(1),
        scene.until(lambda: scene.engine.in_force == 1),
        scene.until(lambda: scene.heads.trial is None and scene.engine.staged == 0),
        lambda: scene.lineage.pin(None),
        scene.until(lambda: scene.engine.in_force == 0),
    )


@pytest.mark.parametrize("number", [5, 1])
def test_a_pin_of_what_is_not_there_is_refused(scene: Scene, number: int) -> None:
    scene.add(REFUSED)

    async def pin() -> None:
        with pytest.raises(ApiError, match=f"there is no generation {number} with weights") as told:
            await scene.heads.pin(number)
        assert (told.value.status, told.value.param) == (400, "generation")

    scene.play(pin, scene.looks(2))
    assert scene.lineage.pinned() is None
    assert scene.engine.swaps == []


def test_a_pin_that_the_engine_refuses_changes_nothing(scene: Scene) -> None:
    scene.add(KEPT)
    scene.engine.refused = {1: "fc.weight has 1 values that are not finite"}

    async def pin() -> None:
        with pytest.raises(ApiError, match="not finite"):
            await scene.heads.pin(1)

    scene.play(pin, scene.looks(2))
    assert (scene.engine.in_force, scene.lineage.pinned()) == (0, None)
    scene.engine.refused = {}
    scene.play(lambda: scene.heads.pin(1))  # asked for again: tried again
    assert (scene.engine.in_force, scene.lineage.pinned()) == (1, 1)


def test_of_two_pins_at_once_the_last_one_holds(scene: Scene) -> None:
    scene.add(KEPT)
    scene.add(KEPT)

    async def both() -> None:
        await asyncio.gather(scene.heads.pin(1), scene.heads.pin(2))

    scene.play(both, scene.looks())
    assert (scene.engine.in_force, scene.lineage.pinned()) == (2, 2)
    assert scene.engine.swaps == [1, 2]


def test_a_client_that_leaves_does_not_tear_a_pin(scene: Scene) -> None:
    scene.add(KEPT)

    async def leave() -> None:
        scene.engine.swapping = asyncio.Event()
        pinning = asyncio.create_task(scene.heads.pin(1))
        await asyncio.sleep(0.02)
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        scene.engine.swapping.set()

    scene.play(leave, scene.until(lambda: scene.lineage.pinned() == 1), scene.looks(2))
    assert (scene.engine.in_force, scene.heads.generation) == (1, 1)


def test_a_trial_goes_on_in_the_next_engine(scene: Scene) -> None:
    """Its pairs stand; the one under way begins anew, as the totals do."""
    scene.engine.speedups = {1: 1.4}
    scene.add()
    old = scene.engine

    def pairs() -> int:
        return 0 if scene.heads.trial is None else scene.heads.trial.figures()["pairs"]

    scene.play(scene.until(lambda: pairs() >= 1))
    scene.engine = FakeEngine()
    scene.engine.speedups = old.speedups
    assert scene.heads.trial is not None
    assert pairs() >= 1
    scene.play(scene.until(lambda: scene.lineage.in_force() == 1))
    assert scene.lineage.generation(1).verdict == KEPT


def test_a_candidate_whose_folder_disappears_ends_its_trial(scene: Scene) -> None:
    scene.add()
    scene.play(
        scene.until(lambda: scene.heads.trial is not None),
        lambda: shutil.rmtree(scene.folder / "generations" / "0001"),
        scene.until(lambda: scene.heads.trial is None and scene.engine.in_force == 0),
        scene.looks(),
    )
    assert scene.heads.trial is None


@pytest.mark.parametrize("broken", ["pinned", "pinned and in force"])
def test_a_candidate_does_not_go_on_when_a_pin_that_cannot_be_loaded_ends_its_trial(
    scene: Scene, broken: str
) -> None:
    """Nothing was shown of it."""
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.add(KEPT)
    scene.add()

    def pin() -> None:
        scene.engine.refused = {2: "truncated"} | ({1: "gone"} if "in force" in broken else {})
        scene.lineage.pin(2)

    left = 0 if "in force" in broken else 1
    scene.play(
        scene.until(lambda: scene.heads.trial is not None and scene.engine.in_force == 3),
        pin,
        scene.until(lambda: scene.heads.trial is None and scene.heads.problem is not None),
        scene.looks(),
    )
    assert (scene.engine.in_force, scene.engine.staged) == (left, 0)
    assert (
        scene.heads.problem == f"generation 2 cannot be loaded, generation {left} drafts: truncated"
    )
    assert scene.lineage.generation(3).verdict == CANDIDATE


def test_a_candidate_does_not_go_on_when_the_one_before_cannot_be_loaded_any_more(
    scene: Scene,
) -> None:
    scene.lineage.put_in_force(scene.add(KEPT))
    scene.add()
    scene.play(
        scene.until(lambda: scene.heads.trial is not None and scene.engine.in_force == 2),
        lambda: scene.engine.refused.update({1: "truncated"}),
        scene.until(lambda: scene.heads.problem is not None),
    )
    assert scene.engine.in_force == 0


def test_a_folder_that_cannot_be_read_is_told_and_survived(scene: Scene) -> None:
    (scene.folder / "in_force").write_text("no number")
    scene.play(
        scene.looks(),
        lambda: (scene.folder / "in_force").unlink(),
        scene.until(lambda: scene.heads.problem is None),
    )
    (scene.folder / "in_force").write_text(json.dumps(0))
    scene.play(scene.looks(2))


def test_a_full_disk_does_not_end_the_service(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_force = Lineage.put_in_force
    monkeypatch.setattr(Lineage, "put_in_force", full)
    scene.engine.speedups = {1: 1.4}
    scene.add()
    scene.play(
        scene.until(lambda: scene.heads.trial is not None),
        scene.until(lambda: scene.heads.trial is None),
        scene.until(lambda: scene.engine.in_force == 0),
        # Once there is room, the verdict is kept and holds.
        lambda: monkeypatch.setattr(Lineage, "put_in_force", put_in_force),
        scene.until(lambda: scene.engine.in_force == 1),
    )
    assert (scene.lineage.in_force(), scene.lineage.generation(1).verdict) == (1, KEPT)
