"""What a request is charged for, and what of its tenant reaches the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from app.llm.async_llm import GatewayLLM
from app.request_usage import (
    BYTES_OF_ALTERNATIVE,
    BYTES_OF_TOKEN,
    RequestUsage,
    count_tokenized,
    current_usage,
    set_current_usage,
)
from drafters.config import MAX_K


def sequence(
    index: int = 0, prompt: int = 5, output: int = 0, cached: int = 0, **times: float
) -> Any:
    known = {"queued_ts": 0.0, "scheduled_ts": 0.0, "first_token_ts": 0.0, "last_token_ts": 0.0}
    return SimpleNamespace(
        request_index=index,
        prompt_len=prompt,
        stats=SimpleNamespace(**{**known, **times}),
        detokenizer=SimpleNamespace(num_output_tokens=lambda: output),
        spec_decode_metrics=None,
        external_req_id="id",
        num_cached_tokens=cached,
    )


def used_by(*sequences: Any) -> RequestUsage:
    usage = RequestUsage()
    for each in sequences:
        usage.enter(each, ())
    return usage


def test_sequences_that_the_engine_has_are_told_from_those_that_it_had() -> None:
    usage, unfinished = RequestUsage(), {"a", "b", "c"}
    for name, first in (("a", 1.0), ("b", 0.0), ("c", 1.0)):
        each = sequence(first_token_ts=first)
        each.request_id = each.external_req_id = name
        usage.enter(each, unfinished)
    without_statistics = sequence()
    without_statistics.request_id, without_statistics.stats = "d", None
    usage.enter(without_statistics, unfinished)
    assert usage.in_engine == (2, 1)
    unfinished.add("d")
    assert usage.in_engine == (2, 2)
    unfinished.remove("a")  # and the reader has not come so far
    assert usage.in_engine == (1, 2)
    usage.end("c")
    assert usage.in_engine == (0, 2)


def test_copies_of_one_prompt_share_it_and_prompts_do_not() -> None:
    usage = used_by(sequence(0, 5, 3), sequence(1, 5, 4), sequence(0, 7, 1))
    assert (usage.prompt_tokens, usage.output_tokens) == (12, 8)


@pytest.mark.parametrize(
    ("tokens", "too_many"), [([20], False), ([21], True), ([10, 10], False), ([10, 11], True)]
)
def test_log_probabilities_of_all_prompts_are_bounded_together(
    tokens: list[int], too_many: bool
) -> None:
    bounded, unbounded = RequestUsage(max_alternatives=100), RequestUsage()
    for usage in (bounded, unbounded):
        for count in tokens:
            usage.count_alternatives(output_tokens=count, output_width=5)
    assert bounded.asks_for_too_many is too_many
    assert not unbounded.asks_for_too_many


def test_an_answer_has_the_log_probabilities_of_its_own_tokens() -> None:
    """Catches: a short answer without a limit of its output, which counted as a whole context."""
    usage = used_by(sequence(0, 5, 3), sequence(1, 5, 4))
    assert usage.alternatives_bytes == 0
    usage.count_alternatives(output_tokens=2 * 131_072, output_width=6)
    assert usage.alternatives_bytes == 7 * 6 * BYTES_OF_ALTERNATIVE
    usage.count_alternatives(prompt_tokens=5, prompt_width=4)
    assert usage.alternatives_bytes == (7 * 6 + 5 * 4) * BYTES_OF_ALTERNATIVE


def test_an_answer_has_the_ids_of_its_tokens_and_what_it_repeats() -> None:
    usage = used_by(sequence(0, 5, 3), sequence(1, 5, 4))
    assert usage.answer_bytes == 0
    usage.returns_token_ids = True
    assert usage.answer_bytes == (7 + 5) * BYTES_OF_TOKEN
    usage.repeated_tokens, usage.echoed_bytes = 10, 1000
    assert usage.answer_bytes == (7 + 5 + 10) * BYTES_OF_TOKEN + 1000


def test_cached_tokens_are_those_of_all_prompts_and_of_each_first_copy() -> None:
    """A later copy finds what the first one has just left."""
    usage = used_by(
        sequence(0, cached=16), sequence(1, cached=48), sequence(0, cached=32), sequence(1)
    )
    assert usage.cached_tokens == 48
    usage.end("id")
    assert usage.cached_tokens == 48
    assert used_by().cached_tokens is None


def test_begun_is_a_first_token_and_not_a_place_in_the_queue() -> None:
    waiting, running = sequence(queued_ts=1.0), sequence(first_token_ts=4.0)
    assert not used_by(waiting).begun
    assert used_by(waiting, running).begun


def test_times_are_of_the_sequence_that_began_first() -> None:
    first = sequence(queued_ts=1, scheduled_ts=2, first_token_ts=5, last_token_ts=6)
    second = sequence(queued_ts=1, scheduled_ts=6, first_token_ts=7, last_token_ts=9)
    timing = used_by(second, first, sequence()).timing
    assert timing is not None
    assert (timing.queued_s, timing.prefill_s, timing.decode_s) == (1, 3, 4)
    assert used_by(sequence()).timing is None


def test_drafts_are_of_all_choices_that_have_ended() -> None:
    """Steps that verified drafts, by how many were accepted: 3 times none, 1 one, 4 two."""
    first, second = sequence(), sequence(1)
    assert used_by(first).drafts is None
    first.spec_decode_metrics = SimpleNamespace(histogram=[3, 1, 4], num_draft_tokens=16)
    second.spec_decode_metrics = SimpleNamespace(histogram=[2, 0, 0], num_draft_tokens=4)
    drafts = used_by(first, second, sequence()).drafts
    assert drafts is not None
    assert (drafts.steps, drafts.drafted, drafts.accepted) == (10, 20, 9)
    assert (drafts.k, drafts.length) == (2.0, 1.9)


def test_an_engine_without_statistics_charges_the_prompt() -> None:
    blind = sequence()
    blind.stats = None
    usage = used_by(blind)
    assert (usage.prompt_tokens, usage.output_tokens, usage.begun) == (5, 0, False)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),  # vLLM's request
            st.integers(0, 2),
            st.integers(0, 9),
            st.sampled_from([0.0, 3.0, 4.0, 7.0]),
            st.none() | st.lists(st.integers(0, 5), min_size=3, max_size=3),
        ),
        max_size=6,
    )
)
def test_what_has_ended_counts_as_before_and_is_dropped(
    given_sequences: list[tuple[str, int, int, float, list[int] | None]],
) -> None:
    usage = RequestUsage()
    for request, index, output, first, histogram in given_sequences:
        times = {"queued_ts": 1.0, "scheduled_ts": 2.0, "first_token_ts": first}
        each = sequence(index, 5, output, **times, last_token_ts=first + output)
        each.external_req_id = request
        if histogram is not None:
            each.spec_decode_metrics = SimpleNamespace(
                histogram=histogram, num_draft_tokens=2 * sum(histogram)
            )
        usage.enter(each, ())

    def counts() -> tuple[Any, ...]:
        return usage.prompt_tokens, usage.output_tokens, usage.begun, usage.drafts, usage.timing

    before = counts()
    for request in "abca":
        usage.end(request)
        assert counts() == before
        assert all(each.external_req_id != request for each in usage.sequences)
    assert usage.sequences == []


async def test_requests_do_not_share_their_usage() -> None:
    async def request_usage(i: int) -> bool:
        mine = RequestUsage(priority=i)
        set_current_usage(mine)
        await asyncio.sleep(0)
        return await asyncio.create_task(seen()) is mine

    async def seen() -> RequestUsage | None:
        return current_usage()

    assert all(await asyncio.gather(*(asyncio.create_task(request_usage(i)) for i in range(10))))


@pytest.mark.parametrize(("policy", "priority"), [("priority", -3), ("fcfs", 0)])
def test_what_the_tenant_may_reaches_the_engine(policy: str, priority: int) -> None:
    """Under another policy vLLM refuses a priority; what a client sets itself does not count."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    params = SamplingParams(extra_args={MAX_K: 99, "other": 1})
    kwargs: dict[str, Any] = {"priority": 0}
    llm = cast("GatewayLLM", SimpleNamespace(vllm_config=config))
    GatewayLLM._apply_tenant_limits(llm, RequestUsage(priority=-3, max_k=2), params, kwargs)
    assert kwargs["priority"] == priority
    assert params.extra_args == {MAX_K: 2, "other": 1}
    GatewayLLM._apply_tenant_limits(llm, RequestUsage(), params, kwargs)
    # A client may ask for less.
    GatewayLLM._apply_tenant_limits(llm, RequestUsage(max_k=9), params, kwargs)
    assert params.extra_args == {MAX_K: 2, "other": 1}


@pytest.mark.parametrize(("answer", "paid"), [(7, 7), (None, 100)], ids=["counted", "refused"])
async def test_the_tokenizers_work_is_entered_as_counted_or_as_charged(
    answer: int | None, paid: int
) -> None:
    """A refusal that comes after the work has no count."""
    usage = RequestUsage(charged=100)

    async def call(request: str) -> int | None:
        assert usage.tokenized == 100, "whoever leaves now pays what was charged"
        return answer

    set_current_usage(usage)
    assert await count_tokenized(call, lambda _, count: count)("text") == answer
    assert usage.tokenized == paid


def test_followed_sequences_are_there_after_the_response_has_ended() -> None:
    """The fault: a stream that was closed settles its usage before vLLM aborts its request."""
    usage = RequestUsage(captured_as="")
    first, second, other = (SimpleNamespace(external_req_id=name) for name in "aab")
    usage.followed += [first, second, other]
    usage.sequences.clear()
    assert usage.end_followed("a") == [first, second]
    assert usage.end_followed("a") == []
    assert usage.end_followed("b") == [other]
