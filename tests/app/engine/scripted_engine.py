"""An engine client without an engine: it answers with given tokens.

Everything in front of the engine core is vLLM's own (renderer, input and output processing,
serving classes), so that what is tested is what goes over the wire.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import ModelConfig, VllmConfig
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from app.engine.adapter import Adapter
from app.engine.first_output import watched
from app.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[3]
TARGET = REPOSITORY / "models/embedded/target"
MODEL = "aerie-embedded"


@cache
def _config() -> VllmConfig:
    model = ModelConfig(model=str(TARGET), dtype="float32", max_model_len=2048)
    config = VllmConfig()
    config.model_config = model
    return config


class ScriptedEngine:
    """vLLM's EngineClient as far as the serving classes use it.

    `script` is the text that the model "generates", `steps` how many tokens come at once (the
    pattern repeats). The prompts that were asked for are kept in `prompts`, as text.
    """

    errored = False
    input_processor = None

    def __init__(self) -> None:
        self.vllm_config = _config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.tokenizer = self.renderer.get_tokenizer()
        self.script = ""
        self.steps: Sequence[int] = (1,)
        self.prompts: list[str] = []

    def check_admission(self, n: int = 1) -> None:
        """There is always room."""

    def tokens(self) -> list[int]:
        """Token ids of the script, and the end of the turn."""
        ids: list[int] = self.tokenizer.encode(self.script, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id]

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The script, cut at `max_tokens`."""
        return watched(self._generate(prompt, sampling_params, request_id))

    async def _generate(
        self, prompt: Any, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        params.update_from_tokenizer(self.tokenizer)
        ids = prompt["prompt_token_ids"]
        self.prompts.append(self.tokenizer.decode(ids))
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        queue = RequestOutputCollector(params.output_kind, request_id)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=request_id,
        )
        processor.add_request(request, None, queue=queue)
        left, step = self.tokens()[: params.max_tokens], 0
        while left:
            size = self.steps[step % len(self.steps)]
            new, left, step = left[:size], left[size:], step + 1
            reason = None
            if not left:
                ended = new[-1] == self.tokenizer.eos_token_id
                reason = FinishReason.STOP if ended else FinishReason.LENGTH
            output = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=new,
                new_logprobs=None if params.logprobs is None else _logprobs(new, params.logprobs),
                finish_reason=reason,
            )
            aborted = processor.process_outputs([output]).reqs_to_abort  # at a stop string
            if (ready := queue.get_nowait()) is not None:
                yield ready
            if aborted:
                return


def _logprobs(tokens: list[int], alternatives: int) -> LogprobsLists:
    """The chosen token first, and others behind it."""
    ids = np.array([[token, *range(10, 10 + alternatives)] for token in tokens])
    values = np.tile(-0.5 - np.arange(alternatives + 1, dtype=np.float32), (len(tokens), 1))
    return LogprobsLists(ids, values, np.zeros(len(tokens), dtype=np.int64))


class Client:
    """The gateway's operations over a ScriptedEngine."""

    def __init__(self, **model: Any) -> None:
        self.engine = ScriptedEngine()
        settings = Settings.model_validate(
            {"model": {"model": str(TARGET), "served_model_name": MODEL, **model}}
        )
        self.adapter = Adapter(self.engine, settings)  # type: ignore[arg-type]

    async def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer to a body. Raises ApiError."""
        payload = json.loads(json.dumps({"model": MODEL, **body}))
        reply = await self.adapter.operations[operation](payload)
        assert isinstance(reply.answer, dict)
        answer: dict[str, Any] = json.loads(json.dumps(reply.answer))
        return answer

    async def events(self, operation: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of the events that answer a body with `stream`."""
        payload = json.loads(json.dumps({"model": MODEL, "stream": True, **body}))
        reply = await self.adapter.operations[operation](payload)
        assert not isinstance(reply.answer, dict)
        found = []
        async for text in reply.answer:
            data = next(line[6:] for line in text.splitlines() if line.startswith("data: "))
            if data != "[DONE]":
                found.append(json.loads(data))
        return found
