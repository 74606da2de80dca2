"""AsyncLLM with the two corrections that must sit at the source of every protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from app.engine.first_output import watched


class GatewayLLM(AsyncLLM):
    """vLLM's engine client (vllm/v1/engine/async_llm.py).

    Its outputs settle the request's FirstOutput, and the alternatives of each token come
    in order of probability: stock puts the sampled token first, so that the k entries
    which the serving classes cut off are not the k most likely ones.
    """

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Same contract as AsyncLLM.generate."""
        return watched(_ranked(super().generate(*args, **kwargs)))


async def _ranked(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            for completion in output.outputs:
                if completion.logprobs:
                    completion.logprobs = [_by_probability(step) for step in completion.logprobs]
            yield output
    finally:
        await outputs.aclose()


def _by_probability(step: dict[int, Any] | None) -> dict[int, Any] | None:
    if step is None:
        return None
    return dict(sorted(step.items(), key=lambda entry: -entry[1].logprob))
