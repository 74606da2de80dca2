"""A gateway over HTTP whose model is made up: everything in front of the engine is real."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from app.endpoints import declared
from app.main import create_app
from app.server import connection
from app.serving.adapter import Adapter
from app.settings import load
from tests.app.fake_engine import TARGET, FakeEngine, FakeLlm

MODEL = "stand-in"
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = '{"name": "Ada", "age": 36}'
FORCED = f'<tool_call>\n{{"name": "User", "arguments": {USER}}}\n</tool_call>'
SUNNY = "It is sunny in Rome."
HELLO = "Hello from the stand-in."


class ActingLlm(FakeLlm):
    """Calls get_weather when it is shown the tool, tells the result once it has it, and fills in a
    User where the output is constrained."""

    def _outputs(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        text = self.renderer.get_tokenizer().decode(prompt["prompt_token_ids"])
        constraint = params.structured_outputs
        if constraint is not None and constraint.json is not None:
            self.answer = USER
        elif '"User"' in text and "get_weather" not in text:
            self.answer = FORCED
        elif "sunny" in text:
            self.answer = SUNNY
        else:
            self.answer = WEATHER if "get_weather" in text else HELLO
        return super()._outputs(prompt, params, request_id)


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    """http://HOST:PORT of the gateway."""
    tree = load(
        {
            "model": str(TARGET), "served_model_name": MODEL, "k": "0",
            "tool_call_parser": "hermes", "allowed_origins": "*",
        },
        {},
    )  # fmt: skip
    engine = FakeEngine(tree)
    engine.llm = ActingLlm(HELLO)
    engine._adapter = Adapter(engine.llm, tree, declared())  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            create_app(tree, engine),
            http=connection.factory(tree.server),  # type: ignore[arg-type]
            log_level="warning",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        yield url
        server.should_exit = True
        thread.join()
