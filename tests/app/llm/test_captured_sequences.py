"""What is captured of vLLM's sequences, with its own output processor."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from app.llm.captured_sequences import MIN_ANSWER, captured_from, is_captured

PROMPT = [5, 6, 7]


def request(**changes: Any) -> EngineCoreRequest:
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA)
    fields: dict[str, Any] = {
        "request_id": "r",
        "external_req_id": "r",
        "prompt_token_ids": PROMPT,
        "mm_features": None,
        "sampling_params": params,
        "pooling_params": None,
        "arrival_time": time.time(),
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})


def test_a_sequence_is_captured_as_far_as_it_got_unless_that_is_short() -> None:
    processor = OutputProcessor(None, log_stats=False)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor.add_request(request(), None, queue=queue)
    sequence = processor.request_states["r"]
    processor.process_outputs([EngineCoreOutput("r", [9] * (MIN_ANSWER - 1))])
    assert captured_from(sequence, "search") is None
    processor.process_outputs([EngineCoreOutput("r", [8])])
    processor.abort_requests(["r"], internal=True)
    found = captured_from(sequence, "search")
    assert found is not None
    assert (found.tenant, list(found.prompt)) == ("search", PROMPT)
    assert list(found.answer) == [9] * (MIN_ANSWER - 1) + [8]
    assert abs(found.at - time.time()) < 60


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_features": [object()]},
        {"lora_request": object()},
        {"prompt_embeds": object(), "prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"sampling_params": None},
        {"prompt_token_ids": []},
    ],
)
def test_what_the_head_cannot_be_trained_on_is_not_captured(changes: dict[str, Any]) -> None:
    assert is_captured(request())
    assert not is_captured(request(**changes))
