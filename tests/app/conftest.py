"""The gateway over vLLM's own serving classes and a fake engine below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from fastapi.testclient import TestClient

from app.main import create_app
from app.settings import load

ANSWER = "def area(width, height):\n    return width * height\n"
Gateway = Callable[..., TestClient]


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """A client of the gateway with the given settings, and `answer` as what its model says. It
    is made once for each set of settings; `client.app.state.engine.llm` is the fake."""
    from app.serving.adapter import Adapter  # vLLM takes seconds to import
    from tests.app.fake_engine import TARGET, FakeEngine, FakeLlm

    with ExitStack() as stack:

        @cache
        def make(*, answer: str = ANSWER, **settings: str) -> TestClient:
            given = {"model": str(TARGET), "served_model_name": "fake", "k": "0", **settings}
            tree = load(given, {})
            engine = FakeEngine(tree)
            engine.llm = FakeLlm(answer)
            engine._adapter = Adapter(engine.llm, tree)  # type: ignore[arg-type]
            client = TestClient(create_app(tree, engine), raise_server_exceptions=False)
            return stack.enter_context(client)

        yield make
