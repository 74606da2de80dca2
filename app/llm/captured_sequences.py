"""Which sequences of vLLM are captured, and what is captured of them: no vllm import."""

from __future__ import annotations

import time
from typing import Any

from drafters.learning.captured import Captured

MIN_ANSWER = 16  # tokens: of fewer, little can be learned


def is_captured(request: Any) -> bool:
    """Whether the sequence of an EngineCoreRequest is one to learn from: without images or
    embeddings in its prompt, and of no adapter."""
    if request.sampling_params is None or not request.prompt_token_ids:
        return False
    if request.prompt_embeds is not None or request.mm_features:
        return False
    return request.lora_request is None and not request.resumable


def captured_from(sequence: Any, tenant: str) -> Captured | None:
    """What is captured of a vLLM RequestState that has ended; None if its answer is too short."""
    if sequence.detokenizer.num_output_tokens() < MIN_ANSWER:
        return None
    return Captured(
        at=time.time(),
        tenant=tenant,
        prompt=sequence.prompt_token_ids,
        answer=sequence.detokenizer.output_token_ids,
    )
