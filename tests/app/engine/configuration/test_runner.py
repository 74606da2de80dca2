"""Which ways to start an engine are tried, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.configuration.runner import Blame, StartPath, StartPlan, runner_wish, start_plan
from app.errors import StartupError
from app.settings import Settings, load

V2, V1, EAGER, NO_DRAFTS = StartPath


def settings(**given: str) -> Settings:
    return load({"model": "org/target", "drafter": "org/head", **given}, {})


@pytest.mark.parametrize(
    ("on_cpu", "wish", "paths"),
    [
        (False, None, (V2, V1, EAGER, NO_DRAFTS)),
        (False, True, (V2, V1, EAGER, NO_DRAFTS)),
        (False, False, (V1, EAGER, NO_DRAFTS)),
        (True, None, (V1,)),
        (True, False, (V1,)),
        (True, True, (V2, V1, NO_DRAFTS)),
    ],
)
def test_a_gpu_begins_with_v2_and_a_cpu_stays_on_v1(
    on_cpu: bool, wish: bool | None, paths: tuple[StartPath, ...]
) -> None:
    assert start_plan(settings(), on_cpu=on_cpu, wish=wish).paths == paths


@pytest.mark.parametrize("on_cpu", [False, True])
def test_without_a_head_there_is_one_path_and_vllm_chooses_the_runner(on_cpu: bool) -> None:
    plan = start_plan(settings(k="0"), on_cpu=on_cpu, wish=None)
    assert plan.paths == (NO_DRAFTS,)
    assert [NO_DRAFTS.runner(wish) for wish in (None, False, True)] == [None, "0", "1"]


@pytest.mark.parametrize(
    ("failed", "blame", "following"),
    [
        (V2, Blame.TARGET, None),
        (V2, Blame.UNSUPPORTED, V1),
        (V2, Blame.HEAD, NO_DRAFTS),
        (V2, Blame.DRAFTS, NO_DRAFTS),
        (V2, Blame.RUNNER, EAGER),
        (V1, Blame.DRAFTS, NO_DRAFTS),
        (V1, Blame.RUNNER, EAGER),
        (EAGER, Blame.DRAFTS, NO_DRAFTS),
        # The head is not what broke: without it the same code would run.
        (EAGER, Blame.RUNNER, None),
        (NO_DRAFTS, Blame.DRAFTS, None),
    ],
)
def test_the_next_path_is_one_that_can_work(
    failed: StartPath, blame: Blame, following: StartPath | None
) -> None:
    plan = start_plan(settings(), on_cpu=False, wish=None)
    assert plan.after(failed, blame) == following


@pytest.mark.parametrize("blame", list(Blame))
def test_a_cpu_has_no_second_path(blame: Blame) -> None:
    assert start_plan(settings(), on_cpu=True, wish=None).after(V1, blame) is None


@pytest.mark.parametrize("on_cpu", [False, True])
def test_lookups_that_an_option_forbids_end_no_start(on_cpu: bool) -> None:
    """Without a head nobody asked for drafts: the model is served without them."""
    plan = start_plan(load({"model": "org/target"}, {}), on_cpu=on_cpu, wish=None)
    assert plan.after(V1, Blame.UNSUPPORTED) is NO_DRAFTS
    assert plan.after(V1, Blame.TARGET) is None
    for blame in (Blame.DRAFTS, Blame.RUNNER):
        assert plan.after(plan.first, blame) is NO_DRAFTS, "and not lookups without compilation"
    # Where nothing compiles, neither lookups nor their absence help.
    without_compilation = None if on_cpu else EAGER
    assert plan.after(NO_DRAFTS, Blame.RUNNER) is without_compilation


def test_strict_speculation_ends_at_the_first_failure() -> None:
    strict = settings(strict_speculation="true")
    plan = start_plan(strict, on_cpu=False, wish=None)
    assert {plan.after(V2, blame) for blame in set(Blame) - {Blame.UNSUPPORTED}} == {None}
    assert plan.after(V2, Blame.UNSUPPORTED) == V1, "what V2 is not made for is V1's: no failure"
    wished = start_plan(strict, on_cpu=False, wish=True)
    assert wished.after(V2, Blame.UNSUPPORTED) is None


def test_on_a_cpu_v1_with_compilation_follows_v2() -> None:
    """Catches: no path at all where there is no V1 without compilation."""
    plan = StartPlan((V2, V1, NO_DRAFTS), wished=True)
    assert plan.after(V2, Blame.RUNNER) == plan.after(V2, Blame.UNSUPPORTED) == V1


def test_a_path_changes_what_it_must_and_nothing_else() -> None:
    asked = settings(engine_args='{"speculative_config": {"method": "ngram"}, "swap_space": 1}')
    assert V2.settings(asked) is V1.settings(asked) is asked
    eager, plain = EAGER.settings(asked), NO_DRAFTS.settings(asked)
    assert eager.engine.enforce_eager and eager.speculates
    assert eager.speculation == asked.speculation
    assert not plain.speculates and not plain.engine.enforce_eager
    assert plain.engine.engine_args == {"swap_space": 1}
    assert (V2.runner(None), V1.runner(True), EAGER.runner(None)) == ("1", "0", "0")


@pytest.mark.parametrize(
    ("environ", "wish"), [({}, None), ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, True),
                          ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, False)],
)  # fmt: skip
def test_vllms_variable_is_a_wish(environ: dict[str, Any], wish: bool | None) -> None:
    assert runner_wish(environ) is wish


def test_a_wish_that_vllm_cannot_read_stops_the_start() -> None:
    with pytest.raises(StartupError, match="VLLM_USE_V2_MODEL_RUNNER=yes"):
        runner_wish({"VLLM_USE_V2_MODEL_RUNNER": "yes"})


def test_v2_lacks_the_sources_that_need_the_newest_tokens() -> None:
    headless = load({"model": "org/target"}, {})
    assert V2.absent_sources(settings()) == ("lookup", "grammar")
    assert V2.absent_sources(headless) == ("grammar",)
    assert V2.absent_sources(settings(k="0")) == ()
    assert all(path.absent_sources(settings()) == () for path in (V1, EAGER, NO_DRAFTS))
