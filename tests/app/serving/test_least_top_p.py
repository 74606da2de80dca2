"""`top_p` 0, which OpenAI's API takes and vLLM does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from app.errors import ApiError
from app.validation.fields import LEAST_TOP_P
from tests.app.scripted_engine import Client

USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "chat": {"messages": USER, "max_tokens": 4},
    "completions": {"prompt": "hi", "max_tokens": 4},
    "responses": {"input": "hi", "max_output_tokens": 4},
    "messages": {"messages": USER, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def client() -> Client:
    return Client()


@pytest.mark.parametrize("operation", BODIES)
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_zero_is_taken(
    client: Client, operation: str, zero: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a 400 for `top_p` 0 in any API, and one that samples from all tokens."""
    sampling: list[Any] = []
    generate = client.engine.generate

    def recorded(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        sampling.append(params)
        return generate(prompt, params, *args, **kwargs)

    monkeypatch.setattr(client.engine, "generate", recorded)
    client.engine.script = "Hi."
    asyncio.run(client.answer(operation, {**BODIES[operation], "top_p": zero}))
    assert [(params.top_p, params.top_k) for params in sampling] == [(LEAST_TOP_P, 1)]


@pytest.mark.parametrize("operation", BODIES)
@pytest.mark.parametrize("value", [-0.1, 1.1, False])
def test_other_values_are_refused(client: Client, operation: str, value: Any) -> None:
    """Catches: values that no API takes, false among them, taken for 0."""
    with pytest.raises(ApiError) as refused:
        asyncio.run(client.answer(operation, {**BODIES[operation], "top_p": value}))
    assert (refused.value.status, refused.value.param) == (400, "top_p")


def test_one_token_is_left_of_a_large_vocabulary() -> None:
    """Catches: several of many almost equal tokens that stay, as a small `top_p` alone leaves
    them."""
    logits = torch.zeros(1, 300_000)
    logits[0, 7] = 0.01
    kept = apply_top_k_top_p_pytorch(logits, torch.tensor([1]), torch.tensor([LEAST_TOP_P]))
    assert torch.isfinite(kept).nonzero().tolist() == [[0, 7]]
