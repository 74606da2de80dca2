"""No readiness without a head that drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine import readiness
from app.engine.configuration.runner import Blame
from app.engine.start_failure import StartFailureError
from app.errors import StartupError
from app.llm.head_acceptance import FirstDrafts
from app.llm.vllm_errors import NonFiniteError
from app.observability import metrics
from app.settings import load

GOOD: dict[str, Any] = {
    "proposer": "ParallelDrafter",
    "head": "Eagle3LlamaForCausalLM",
    "parallel": True,
    "k": 5,
    "parameters": 1,
    "mask_hidden": True,
}
EAGLE_3 = {**GOOD, "proposer": "SequentialDrafter", "parallel": False, "mask_hidden": False}
LOOKUP = {"proposer": "LookupProposer", "head": None, "parallel": False, "k": 10}
SETTINGS = load({"k": "5"}, {})


def test_a_good_report_is_returned() -> None:
    on_v2 = {**GOOD, "proposer": "ParallelSpeculator"}
    for report in (GOOD, EAGLE_3, on_v2, {**EAGLE_3, "proposer": "SequentialSpeculator"}):
        assert readiness.check_reports(SETTINGS, [report, report]) == report


def test_pipeline_stages_before_the_last_one_draft_nothing() -> None:
    """The fault: an engine of two stages was taken for one without a drafter, and started again
    until it had none."""
    assert readiness.check_reports(SETTINGS, [{}, {}, GOOD, GOOD]) == GOOD
    for reports in ([{}], [{}, None], []):
        with pytest.raises(StartupError, match="without a drafter"):
            readiness.check_reports(SETTINGS, reports)


def test_what_drafts_is_known_by_its_name() -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from drafters.vllm.v1.lookup import LookupProposer
    from drafters.vllm.v1.parallel import ParallelDrafter
    from drafters.vllm.v1.sequential import SequentialDrafter
    from drafters.vllm.v2.lookup import LookupSpeculator
    from drafters.vllm.v2.sequential import SequentialSpeculator
    from drafters.vllm.v2.speculator import ParallelSpeculator

    ours = (ParallelDrafter, ParallelSpeculator, SequentialDrafter, SequentialSpeculator)
    assert set(readiness.DRAFTERS) == {kind.__name__ for kind in ours}
    assert set(readiness.LOOKUPS) == {LookupProposer.__name__, LookupSpeculator.__name__}


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (None, "without a drafter"),
        ({**GOOD, "proposer": "EagleProposer"}, "did not load"),
        ({**GOOD, "parallel": False}, "parallel"),
        ({**GOOD, "mask_hidden": False}, "mask_hidden"),
        ({**GOOD, "k": 3}, "drafts 3 tokens"),
        ({**EAGLE_3, "parallel": True}, "parallel"),
    ],
)
def test_any_worker_without_its_head_stops_the_start(
    report: dict[str, Any] | None, reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        readiness.check_reports(SETTINGS, [GOOD, report])


def test_a_head_without_weights_has_no_mask_to_look_at() -> None:
    settings = load({"k": "5", "engine_args": '{"load_format": "dummy"}'}, {})
    report = {**GOOD, "mask_hidden": False}
    assert readiness.check_reports(settings, [report]) == report
    with pytest.raises(StartupError, match="parallel"):
        readiness.check_reports(settings, [{**report, "parallel": False}])


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({**LOOKUP, "proposer": "NgramProposer"}, "not by lookup"),
        ({**LOOKUP, "k": 5}, "looks up 5 tokens, 10"),
        (None, "without a drafter"),
    ],
)
def test_without_a_head_a_worker_looks_up(report: dict[str, Any] | None, reason: str) -> None:
    settings = load({"model": "org/model"}, {})
    on_v2 = {**LOOKUP, "proposer": "LookupSpeculator"}
    for good in (LOOKUP, on_v2):
        assert readiness.check_reports(settings, [good, good]) == good
    with pytest.raises(StartupError, match=reason):
        readiness.check_reports(settings, [LOOKUP, report])


def test_no_reports_at_all_is_no_proof() -> None:
    with pytest.raises(StartupError):
        readiness.check_reports(SETTINGS, [])


def test_without_speculation_nothing_is_asked() -> None:
    plain = load({"k": "0"}, {})
    assert readiness.check_reports(plain, [None]) is None
    drafts = SimpleNamespace(draft_tokens=0)
    assert asyncio.run(readiness.check_drafts(plain, Repeating(drafts), drafts)) == 0


def test_a_head_that_drafts_nothing_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "STATS_TIMEOUT_S", 0.1)
    drafts = SimpleNamespace(draft_tokens=0)
    with pytest.raises(StartupError, match="no token was drafted"):
        asyncio.run(readiness.check_drafts(SETTINGS, Repeating(drafts), drafts))


class Repeating:
    """An engine that drafts where a text repeats itself."""

    def __init__(self, drafts: SimpleNamespace) -> None:
        self._drafts = drafts

    async def answer(self, texts: Sequence[str], tokens: int) -> None:
        """The warm-up texts do not repeat themselves."""

    async def repeat(self, text: str, tokens: int) -> None:
        self._drafts.draft_tokens += tokens

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("nothing is commanded")


def test_without_a_head_a_text_that_repeats_itself_is_the_proof() -> None:
    drafts = SimpleNamespace(draft_tokens=0)
    settings = load({"model": "org/model"}, {})
    drafted = asyncio.run(readiness.check_drafts(settings, Repeating(drafts), drafts))
    assert drafted == readiness.WARM_UP_TOKENS


def test_the_count_may_arrive_late() -> None:
    drafts = SimpleNamespace(draft_tokens=0)

    async def scenario() -> int:
        asyncio.get_running_loop().call_later(0.1, setattr, drafts, "draft_tokens", 15)
        return await readiness.check_drafts(SETTINGS, Repeating(drafts), drafts)

    assert asyncio.run(scenario()) == 15


class Broken:
    """An engine whose logits are not finite, at any K or with drafts only."""

    def __init__(self, *, with_drafts_only: bool) -> None:
        self.broken, self.with_drafts_only = True, with_drafts_only

    async def repeat(self, text: str, tokens: int) -> None:
        """Nothing is looked up."""

    async def answer(self, texts: Sequence[str], tokens: int) -> None:
        if self.broken:
            raise NonFiniteError

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert (command, arguments["objective"]) == ("steer", "off")
        self.broken = not self.with_drafts_only
        return {}


@pytest.mark.parametrize("k", ["0", "5"])
def test_a_target_whose_logits_are_not_finite_stops_the_start(k: str) -> None:
    given = {"model": "org/target", "dtype": "float16", "k": k, "drafter": "a/head"}
    engine = Broken(with_drafts_only=False)
    with pytest.raises(
        StartupError, match=r"org/target computes .* not finite.*--dtype float16"
    ) as told:
        asyncio.run(readiness.check_finite(load(given, {}), engine))
    assert not isinstance(told.value, StartFailureError), "no other path would cure it"


def test_logits_that_are_not_finite_with_drafts_alone_are_not_the_targets_fault() -> None:
    with pytest.raises(StartFailureError, match="finite at K = 0") as told:
        asyncio.run(readiness.check_finite(SETTINGS, Broken(with_drafts_only=True)))
    assert (told.value.blame, told.value.reason) == (Blame.DRAFTS, "non_finite")


@pytest.mark.parametrize(
    ("changes", "seen", "low"),
    [
        ({}, FirstDrafts(40, 30), False),
        ({}, FirstDrafts(40, 1), True),
        ({"k": "0"}, FirstDrafts(0, 0), False),
        ({"engine_args": '{"load_format": "dummy"}'}, FirstDrafts(40, 0), False),
    ],
)
def test_a_head_of_which_little_is_accepted_is_warned_of(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], seen: FirstDrafts, low: bool
) -> None:
    metrics.WARM_UP_ACCEPTANCE_LOW.set(0)
    settings = load({"model": "org/target", "drafter": "heads/mine", **changes}, {})
    readiness.check_acceptance(settings, SimpleNamespace(draft_tokens=1, first_drafts=seen))
    assert metrics.WARM_UP_ACCEPTANCE_LOW._value.get() == low
    assert ("heads/mine" in caplog.text) == low
