"""An engine below vLLM's own serving classes: the checks, the request models, the chat template and
the tokenizer are real, and only the model's answer is made up."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from app.endpoints import declared
from app.llm.first_token import settle_first_token
from app.main import create_app
from app.serving.adapter import Adapter
from app.settings import load
from tests.app.phased_engine import PhasedEngine

TARGET = Path(__file__).resolve().parents[2] / "models" / "embedded" / "target"
CONTEXT = 2048  # tokens
ANSWER = "def area(width, height):\n    return width * height\n"


class FakeLlm:
    """An engine client (vllm/engine/protocol.py) whose model always says the same."""

    errored = False
    dead_error = RuntimeError("dead")

    def __init__(self, answer: str) -> None:
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config, self.renderer = engine_parts()
        self.model_config = self.vllm_config.model_config
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.answer = answer
        self.sampling: Any = None  # of the newest request

    def check_admission(self, sequences: int = 1) -> None:
        """There is always a place."""

    def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any]:
        """The answer token by token, in the steps that AsyncLLM would give it."""
        return settle_first_token(self._outputs(prompt, params, request_id))

    async def _outputs(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput
        from vllm.sampling_params import RequestOutputKind

        from app.llm.answer_logprobs import Alternatives

        self.sampling = params
        self.input_processor.process_inputs(request_id, prompt, params, ("generate",))
        tokenizer = self.renderer.get_tokenizer()
        ids = tokenizer.encode(self.answer, add_special_tokens=False)
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        for steps in [ids] if whole else [[token] for token in ids]:
            last = whole or steps[0] is ids[-1]
            logprobs = []
            for token in steps:
                text = tokenizer.decode(token)
                logprobs.append(Alternatives(token, {token: Logprob(-0.5, 1, text)}))
                logprobs[-1].text = text
            outputs = [
                CompletionOutput(
                    index=index,
                    text=tokenizer.decode(steps),
                    token_ids=steps,
                    cumulative_logprob=None,
                    logprobs=None if params.logprobs is None else logprobs,
                    finish_reason=finish if last else None,
                )
                for index in range(params.n)
            ]
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=prompt["prompt_token_ids"],
                prompt_logprobs=None,
                outputs=outputs,
                finished=last,
                num_cached_tokens=2,
            )


@cache
def engine_parts() -> tuple[Any, Any]:
    """vLLM's configuration and renderer of the embedded target."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.registry import renderer_from_config

    config = AsyncEngineArgs(
        model=str(TARGET),
        served_model_name=["fake"],
        dtype="float32",
        max_model_len=CONTEXT,
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
    ).create_engine_config()
    return config, renderer_from_config(config)


class FakeEngine(PhasedEngine):
    """Ready at once, with the operations of an adapter over a FakeLlm."""

    llm: FakeLlm


def client(*, answer: str = ANSWER, **settings: str) -> TestClient:
    """A client of the gateway with the given settings, and `answer` as what its model says.
    `client.app.state.engine.llm` is the fake."""
    given = {"model": str(TARGET), "served_model_name": "fake", "k": "0", **settings}
    tree = load(given, {})
    engine = FakeEngine(tree)
    engine.llm = FakeLlm(answer)
    engine._adapter = Adapter(engine.llm, tree, declared())  # type: ignore[arg-type]
    return TestClient(create_app(tree, engine), raise_server_exceptions=False)
