"""What the gateway's end of the engine corrects in its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import GenerationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from app.errors import ApiError
from app.llm.async_llm import NON_FINITE, WARM_UP, GatewayLLM, _corrected, end_non_finite
from app.llm.vllm_errors import ConstraintError, NonFiniteError
from app.observability import metrics


def output(finish_reason: str | None = None, **fields: Any) -> RequestOutput:
    values = {"text": "a", "token_ids": [5], "cumulative_logprob": None, "logprobs": None}
    choice = CompletionOutput(index=0, finish_reason=finish_reason, **{**values, **fields})
    return RequestOutput("id", "prompt", [1, 2], None, [choice], finish_reason is not None)


def corrected(
    *outputs: RequestOutput, constrained: bool = False, silent: bool = False
) -> list[CompletionOutput]:
    async def engine() -> AsyncGenerator[RequestOutput, None]:
        for item in outputs:
            yield item

    async def collect() -> list[CompletionOutput]:
        return [item.outputs[0] async for item in _corrected(engine(), constrained, silent)]

    return asyncio.run(collect())


def test_each_copy_of_the_engine_has_its_own_unfinished_sequences() -> None:
    """Catches: sequences counted for a copy (data-parallel) that does not have them, or those that
    are not sent to any copy yet counted."""
    unfinished = vars(GatewayLLM)["unfinished"].fget
    processor = SimpleNamespace(request_states=dict.fromkeys("abcd"))
    client = SimpleNamespace(engine_ranks_managed=[3])
    llm = SimpleNamespace(output_processor=processor, engine_core=client)
    assert unfinished(llm) == {3: 4}, "the rank by which its outputs are counted"
    client.engine_ranks_managed = [2, 3]
    client.core_engines = [b"2", b"3"]
    client.reqs_in_flight = {"a": b"3", "b": b"2", "c": b"3", "left": b"2"}
    assert unfinished(llm) == {2: 1, 3: 2}


def test_a_grammar_that_the_engine_cannot_compile_is_the_requests_mistake() -> None:
    with pytest.raises(ConstraintError):
        corrected(output("error", token_ids=[]), constrained=True)


def test_any_other_request_given_up_before_its_first_token_is_ours() -> None:
    with pytest.raises(GenerationError):
        corrected(output("error", token_ids=[]))


def test_after_the_first_token_the_serving_classes_tell() -> None:
    assert corrected(output(), output("error"))[-1].finish_reason == "error"


def test_a_grammar_may_end_in_nothing_later_on() -> None:
    with pytest.raises(ConstraintError):
        corrected(output(), output("error"), constrained=True)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("constrained", [False, True])
def test_logits_that_are_not_finite_end_a_request_at_any_time(
    before: int, constrained: bool
) -> None:
    last = output("error", token_ids=[], stop_reason=NON_FINITE)
    with pytest.raises(NonFiniteError):
        corrected(*[output()] * before, last, constrained=constrained)


def test_sequences_whose_logits_are_not_finite_lose_these_tokens() -> None:
    good = EngineCoreOutput("good", [3])
    broken = EngineCoreOutput("broken", [0, 7], num_nans_in_logits=1)
    at_its_end = EngineCoreOutput(
        "at its end", [0], finish_reason=FinishReason.LENGTH, num_nans_in_logits=2
    )
    count_before = metrics.NON_FINITE._value.get()
    assert end_non_finite([good, broken, at_its_end]) == ["broken"], "the engine ended the other"
    assert (good.new_token_ids, good.finish_reason) == ([3], None)
    for ended in (broken, at_its_end):
        assert ended.new_token_ids == []
        assert (ended.finish_reason, ended.stop_reason) == (FinishReason.ERROR, NON_FINITE)
    assert metrics.NON_FINITE._value.get() == count_before + 2
    warm_up = EngineCoreOutput(f"{WARM_UP}3-1a2b3c4d", [0], num_nans_in_logits=1)
    assert end_non_finite([warm_up]) == [warm_up.request_id]
    assert metrics.NON_FINITE._value.get() == count_before + 2, "no client's: nobody is paged"


def test_a_scored_prompt_has_no_output() -> None:
    (choice,) = corrected(output("length", logprobs=[{5: Logprob(-1.0)}]), silent=True)
    assert (choice.text, list(choice.token_ids), choice.logprobs) == ("", [], None)


def test_alternatives_come_in_order_of_probability() -> None:
    step = {5: Logprob(-3.0), 1: Logprob(-1.0), 2: Logprob(-2.0)}
    (choice,) = corrected(output(logprobs=[step]))
    assert choice.logprobs is not None
    assert list(choice.logprobs[0]) == [1, 2, 5]


class Unanswering:
    """An engine core that takes a call and dies over it, or is dead already."""

    def __init__(self, dead: bool) -> None:
        self.dead = dead

    async def call_utility_all_async(self, *arguments: Any) -> Any:
        if self.dead:
            raise EngineDeadError()
        await asyncio.Event().wait()

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


@pytest.mark.parametrize("dead", [True, False])
def test_a_call_into_a_dying_engine_is_answered(dead: bool) -> None:
    """vLLM would let it wait for ever, and GET /v1/speculation with it."""

    async def scenario() -> None:
        llm = GatewayLLM.__new__(GatewayLLM)
        llm.engine_core = Unanswering(dead)
        llm.output_handler = asyncio.create_task(asyncio.sleep(0.01))
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(llm.speculation("state", {}), 10)
        assert (caught.value.status, caught.value.code) == (503, "engine_lost")

    asyncio.run(scenario())


class Copies:
    """Engine cores that answer alike, but for what each has counted."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers

    async def call_utility_all_async(self, *arguments: Any) -> list[dict[str, Any]]:
        assert arguments[0] == "aerie_speculation"
        return self.answers

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs."""


def test_the_state_of_speculation_is_of_all_copies_of_the_engine() -> None:
    """The fault: with data parallelism every metric of speculation was the first copy's, which may
    have had no request."""

    async def state() -> dict[str, Any]:
        llm = GatewayLLM.__new__(GatewayLLM)
        llm.engine_core = Copies([{"k": 3, "requests": 0}, {"k": 5, "requests": 7}])
        llm.output_handler = asyncio.create_task(asyncio.sleep(10))
        return await llm.speculation("state", {})

    assert asyncio.run(state()) == {"k": 3, "requests": 7}


class Asked(GatewayLLM):
    """Notes which copy of the engine each request of its own goes to."""

    tokenizer = None
    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.copies: list[int | None] = []
        self.prompts: list[list[int]] = []

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[None, None]:
        self.prompts.append(prompt["prompt_token_ids"])
        self.copies.append(kwargs["data_parallel_rank"])
        return
        yield

    def __del__(self) -> None:
        """Nothing was started."""


def test_a_batch_that_is_measured_runs_on_one_copy_and_texts_that_prove_run_on_all() -> None:
    """The fault: with several copies of the engine each had a part of the batch, whose time was
    taken for that of all."""
    llm = Asked()
    asyncio.run(llm.run_dummy_batch(3, 4))
    assert llm.copies == [0, 0, 0]
    asyncio.run(llm.answer(["a", "b"], 4))
    assert llm.copies[3:] == [None, None]


def test_the_requests_of_a_measured_batch_have_texts_of_their_own() -> None:
    """The fault: 64 requests were four texts, for which a mixture reads few of its experts."""
    llm = Asked()
    asyncio.run(llm.run_dummy_batch(64, 4))
    assert len({tuple(prompt) for prompt in llm.prompts}) == 64
