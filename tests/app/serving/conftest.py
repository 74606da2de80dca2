"""The gateway's end of an engine whose core is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import async_llm

from app.endpoints import declared
from app.engine.configuration.options import engine_options
from app.llm.async_llm import GatewayLLM
from app.serving.adapter import Adapter
from app.settings import load
from tests.app.serving.recording_core import CONTEXT, Connect, RecordingCore


@pytest.fixture(scope="module")
def config() -> Any:
    """vLLM's configuration of the embedded target."""
    settings = load({"k": "0", "max_model_len": str(CONTEXT)}, {}, preset="embedded")
    return AsyncEngineArgs(**engine_options(settings)).create_engine_config()


@pytest.fixture
def connect(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes the operations over an engine core, in the running event loop."""
    made: list[GatewayLLM] = []

    def make(core: RecordingCore, settings: dict[str, str] | None = None, **given: Any) -> Adapter:
        monkeypatch.setattr(async_llm.EngineCoreClient, "make_async_mp_client", lambda **_: core)
        llm = GatewayLLM.from_vllm_config(config, disable_log_stats=True, **given)
        made.append(llm)
        return Adapter(llm, load(settings or {}, {}, preset="embedded"), declared())

    yield make
    for llm in made:
        llm.shutdown()
