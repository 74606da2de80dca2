"""An engine client without an engine: it answers with given tokens.

Everything in front of the engine core is vLLM's own (renderer, input and output processing,
serving classes), so that what is tested is what goes over the wire.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from copy import copy, deepcopy
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
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists

from app.endpoints import declared
from app.llm.answer_logprobs import watch_texts
from app.llm.async_llm import _corrected, is_watched, reports_logprobs, reports_tokens
from app.llm.first_token import settle_first_token
from app.llm.token_origins import record, watch
from app.request_usage import RequestUsage
from app.serving.adapter import Adapter
from app.settings import Settings
from drafters.config import HEAD
from drafters.vllm.scheduling.source_counts import RequestSourceCounts

REPOSITORY = Path(__file__).resolve().parents[2]
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
    pattern repeats). With `k` draft tokens in every step but the first, all of a step's tokens but
    the last were drafted, and so was what comes after the end in the same step. The drafts of the
    steps have the `sources` in turn (the pattern repeats). `counts` are those
    of the engine core, of every sequence of the newest request. The prompts that were asked for are
    kept in `prompts`, as text.
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
        self.k = 0
        self.sources: Sequence[str] = (HEAD,)
        self.counts: list[RequestSpecDecodeMetrics] = []

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
        return settle_first_token(self._generate(prompt, sampling_params, request_id))

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
        usage = RequestUsage()
        parent = ParentRequest(request) if params.n > 1 else None
        for index in range(params.n):
            child = copy(request)
            if parent is not None:
                child.request_id, child.sampling_params = parent.get_child_info(index)
            processor.add_request(child, None, parent, index, queue)
            usage.enter(processor.request_states[child.request_id], processor.request_states)
            if reports_tokens(params):
                watch(usage.sequences[-1])
            if reports_logprobs(params):
                watch_texts(usage.sequences[-1], self.tokenizer.all_special_ids)
        told = usage if is_watched(params) else None
        async for output in _corrected(
            self._steps(processor, queue, usage, params), False, False, told
        ):
            yield output

    async def _steps(
        self,
        processor: OutputProcessor,
        queue: RequestOutputCollector,
        usage: RequestUsage,
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """A step of all sequences at a time, as the engine core and AsyncLLM have them."""
        script, stops = self.tokens(), params.stop_token_ids
        if found := [place for place, token in enumerate(script) if token in stops]:
            script = script[: found[0] + 1]
        running = {sequence.request_id: script for sequence in usage.sequences}
        counts = {name: RequestSpecDecodeMetrics.new(self.k) for name in running}
        by_source = {name: RequestSourceCounts() for name in running}
        self.counts, step = list(counts.values()), 0
        while running:
            outputs = []
            for number, (name, rest) in enumerate(list(running.items())):
                left = rest[: params.max_tokens]
                size = self.steps[(step + number) % len(self.steps)]
                if self.k:
                    size = min(size, self.k + 1) if step else 1
                    if step:
                        counts[name].observe(self.k, size - 1)
                        source = self.sources[(step + number) % len(self.sources)]
                        by_source[name].add(source, self.k, size - 1)
                new = left[:size]
                running[name] = left[size:]
                reason, ended = None, False
                if not left[size:]:
                    ended = new[-1] in (self.tokenizer.eos_token_id, *stops)
                    reason = FinishReason.STOP if ended else FinishReason.LENGTH
                    del running[name]
                logprobs = None if params.logprobs is None else logprobs_of(new, params.logprobs)
                snapshot = deepcopy(counts[name]) if self.k else None
                if snapshot is not None and reports_tokens(params):
                    snapshot = by_source[name].attached_to(snapshot)
                outputs.append(
                    EngineCoreOutput(
                        request_id=name,
                        new_token_ids=new,
                        new_logprobs=logprobs,
                        finish_reason=reason,
                        stop_reason=new[-1] if ended and new[-1] in stops else None,
                        spec_decode_metrics=snapshot,
                    )
                )
            record(outputs, processor.request_states)
            step += 1
            for name in processor.process_outputs(outputs).reqs_to_abort:  # at a stop string
                running.pop(name, None)
            if (ready := queue.get_nowait()) is not None:
                yield ready


def logprobs_of(tokens: list[int], alternatives: int) -> LogprobsLists:
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
        self.adapter = Adapter(self.engine, settings, declared())  # type: ignore[arg-type]

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
