"""Which sequences of vLLM are captured, and what is captured of them: no vllm import.

The engine core tells which drafts were accepted every few steps, and not in each output
(drafters/vllm/scheduling/request_steps.py). What it has not told of a sequence that a client left
or a stop string ended is missing at the end of its steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from app.llm.token_origins import log_of
from drafters.config import HEAD, REPORT_STEPS
from drafters.learning.captured import Captured

MIN_ANSWER = 16  # tokens: of fewer, little can be learned
_ATTRIBUTE = "aerie_captured_steps"  # on vLLM's RequestState of a sequence that is captured


def follow(request: Any, sequence: Any) -> bool:
    """Follow the steps of a sequence; returns whether it is one to learn from: without images or
    embeddings in its prompt, and of no adapter. `request` is its EngineCoreRequest, which is told
    to the engine after this.
    """
    params = request.sampling_params
    if params is None or not request.prompt_token_ids or request.prompt_embeds is not None:
        return False
    if request.mm_features or request.lora_request is not None or request.resumable:
        return False
    params.extra_args = {**(params.extra_args or {}), REPORT_STEPS: 1}
    setattr(sequence, _ATTRIBUTE, [])
    return True


def take_steps(outputs: Iterable[Any], sequences: Mapping[str, Any]) -> None:
    """Take the steps out of the engine core's outputs of one step, for sequences that are followed.

    Called before vLLM processes the outputs, which shows no steps of it to clients.
    """
    for output in outputs:
        if (counts := output.spec_decode_metrics) is None:
            continue
        steps = getattr(sequences.get(output.request_id), _ATTRIBUTE, None)
        if steps is None or log_of(sequences[output.request_id]) is not None:
            continue
        steps += zip(counts.per_step_drafted, counts.per_step_accepted, strict=True)
        if counts.histogram:
            counts.per_step_drafted, counts.per_step_accepted = [], []
        else:  # there were no counts to send but these
            output.spec_decode_metrics = None


def captured_from(sequence: Any, tenant: str, generation: int) -> Captured | None:
    """What is captured of a vLLM RequestState that has ended; None if it is not followed, or too
    short."""
    steps = getattr(sequence, _ATTRIBUTE, None)
    if steps is None or sequence.detokenizer.num_output_tokens() < MIN_ANSWER:
        return None
    if (log := log_of(sequence)) is not None:  # its outputs have counts by source instead
        steps = [(step.drafted if step.source == HEAD else 0, step.accepted) for step in log.steps]
    return Captured(
        at=time.time(),
        tenant=tenant,
        generation=generation,
        prompt=sequence.prompt_token_ids,
        answer=sequence.detokenizer.output_token_ids,
        steps=steps,
    )
