"""The gateway over vLLM's own serving classes and a fake engine below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from fastapi.testclient import TestClient

Gateway = Callable[..., TestClient]


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """`tests.app.fake_engine.client`, made once for each set of settings."""
    from tests.app.fake_engine import client  # vLLM takes seconds to import

    with ExitStack() as stack:

        @cache
        def make(**given: str) -> TestClient:
            return stack.enter_context(client(**given))

        yield make
