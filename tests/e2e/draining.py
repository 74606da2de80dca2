"""A gateway that is told to end lets its streams finish, and takes no new work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.waiting import until

from .bodies import greedy
from .gateway import POLL_S, STOP_WITHIN_S, Gateway
from .wire import assert_error, chunks, read_events

# Takes seconds, and far less than the drain may last.
BODY = greedy("def f(", max_tokens=500, stream=True)


def assert_it_drains(
    gateway: Gateway, number: signal.Signals, *, whole_terminal: bool = False
) -> None:
    """Send a signal during a stream: it ends as it should, and then the gateway ends."""
    with streaming(gateway) as (events, first):
        gateway.signal(number, whole_terminal=whole_terminal)
        refused = new_work_while_draining(gateway)
        seen = [first, *events]
    ends = [c["finish_reason"] for p in chunks(seen) for c in p["choices"]]
    assert ends[-1] == "length", f"the stream was cut{gateway.tail()}"
    if refused is not None:
        assert_error(refused, 503)
        assert int(refused.headers["retry-after"]) >= 1
    assert gateway.wait_exit(STOP_WITHIN_S) == 0
    assert gateway.leftovers() == []
    # Nor is the last word about what some library calls leaked.
    assert "leaked" not in gateway.tail()


def new_work_while_draining(gateway: Gateway) -> httpx.Response | None:
    """The answer to a request made once the gateway drains; None if it no longer listens.

    A connection that is made as the socket closes is reset, one that idles then is closed.
    """
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as other:
        try:
            until(
                lambda: other.get("/readyz").status_code != 200,
                what="still says ready after the signal",
                every_s=POLL_S,
            )
            return other.post("/v1/completions", json={**BODY, "stream": False})
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            return None


@contextmanager
def streaming(gateway: Gateway) -> Iterator[tuple[Iterator[Any], Any]]:
    """A stream after its first event."""
    with (
        httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http,
        http.stream("POST", "/v1/completions", json=BODY) as response,
    ):
        events = read_events(response.iter_lines())
        yield events, next(events)
