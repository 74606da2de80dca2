"""The page over a real engine: marks against /metrics, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from tests.app.page.browser import CHROMIUM, Page, browser

from .gateway import MODEL, Gateway
from .test_speculation_header import counters

browsed = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
QUESTION = "def read(path):"
POLLS = 200
SHARE_OF_A_CORE = 0.005  # at one poll a second
NEAR_MS, ROUNDS = 50, 20


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def page(gateway: Gateway, chromium: Any) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    tab = Page(context, gateway.url)
    yield tab
    context.close()
    assert not tab.problems


@browsed
@pytest.mark.usefixtures("fixed_k")
def test_marks_sum_up_to_the_counters(http: httpx.Client, page: Page) -> None:
    page.open()
    before = counters(http)
    answer = page.ask(QUESTION).answered()
    drafted, accepted = (new - old for new, old in zip(counters(http), before, strict=True))
    assert answer.locator(".t.draft").count() == page.figure("drafted")
    beyond = answer.locator("[data-figure=beyond]").count()
    extra = page.figure("beyond") if beyond else 0
    assert page.figure("drafted") + extra == accepted <= drafted
    assert drafted > 0


@browsed
def test_the_race_gives_one_text(page: Page) -> None:
    page.open("race")
    page.tab.get_by_label("Prompt", exact=True).fill(QUESTION)
    page.tab.get_by_role("button", name="Start the race").click()
    page.tab.locator("[data-figure=ratio]").wait_for()
    assert "Both texts are identical" in page.tab.locator(".verdict").inner_text()


def test_polling_costs_next_to_nothing(http: httpx.Client, gateway: Gateway) -> None:
    """Processor time of the gateway and its engine, with that of an idle gateway taken off."""
    if gateway.process is None:
        pytest.skip("this gateway's processes are not known")
    http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 8})
    root = psutil.Process(gateway.process.pid)

    def used() -> float:
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    began, at = used(), time.monotonic()
    time.sleep(5)
    idle = (used() - began) / (time.monotonic() - at)
    began, at = used(), time.monotonic()
    for _ in range(POLLS):
        assert http.get("/page/figures").status_code == 200
    spent = used() - began - idle * (time.monotonic() - at)
    assert spent / POLLS < SHARE_OF_A_CORE


@browsed
def test_the_first_token_comes_as_soon_as_to_curl(http: httpx.Client, page: Page) -> None:
    """At best of so many each as a busy machine needs."""
    page.open()
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0,
        "max_tokens": 8, "stream": True,
    }  # fmt: skip
    direct, shown = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if '"content":"' in line and '"content":""' not in line:
                    direct.append(1000 * (time.perf_counter() - began))
                    break
        page.ask(QUESTION).answered()
        number, unit = page.tab.locator("[data-figure=first]").last.inner_text().split()
        shown.append(float(number) * (1000 if unit == "s" else 1))
        page.tab.get_by_role("button", name="New chat").click()
        if min(shown) - min(direct) < NEAR_MS:
            break
    assert min(shown) - min(direct) < NEAR_MS
