"""A generation is pinned over HTTP under running streams: no text changes, and whoever looks sees
which head drafts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import load
from drafters.learning.lineage import KEPT, REFUSED, Lineage
from tests.drafters.noised_head import noised

from .gateway import MODEL, Gateway
from .wire import JSON, assert_error, metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAD = Path(str(load({}, {}, preset="embedded").speculation.drafter))
PATH = "/v1/speculation"
STREAMS = 16
SWAPS = (0, 1, 0, 1)


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with generation 1, a noised head, and generation 2, whose weights are gone."""
    folder = tmp_path_factory.mktemp("learning")
    folder.chmod(0o700)
    lineage = Lineage(folder)
    for verdict in (KEPT, REFUSED):
        shutil.rmtree(folder / "new", ignore_errors=True)
        lineage.add(noised(HEAD, folder / "new", 0.4), {"verdict": verdict, "parent": 0})
    return folder


@pytest.fixture(scope="module")
def learner(learning: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("generations") / "gateway.log"
    options = ["--enforce-eager", "--learn", str(learning), "--no-learn-train"]
    gateway = Gateway.launch(log, options)
    try:
        yield gateway.wait_ready()
        assert gateway.stop() == 0, gateway.tail()
        assert gateway.leftovers() == []
    finally:
        gateway.kill()


@pytest.fixture
def client(learner: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=learner.url, timeout=60, trust_env=False) as client:
        client.patch(PATH, json={"objective": "fixed", "k": 4}).raise_for_status()
        yield client
        client.patch(PATH, json={"generation": "auto"}).raise_for_status()


def head(client: httpx.Client) -> JSON:
    found: JSON = client.get(PATH).json()["head"]
    return found


def text(client: httpx.Client, number: int) -> str:
    body = {
        "model": MODEL, "temperature": 0, "max_tokens": 200, "ignore_eos": True,
        "prompt": f"Write a story about {number} birds and a river.",
    }  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def texts(client: httpx.Client, meanwhile: Any = None) -> list[str]:
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(text, client, number) for number in range(STREAMS)]
        if meanwhile is not None:
            meanwhile()
        return [one.result() for one in running]


def test_a_pin_under_running_streams_changes_no_text(client: httpx.Client) -> None:
    before = texts(client)
    seen = []

    def swap() -> None:
        for number in SWAPS:
            state = client.patch(PATH, json={"generation": number})
            state.raise_for_status()
            seen.append(state.json()["head"]["generation"])

    assert texts(client, swap) == before
    assert seen == list(SWAPS)


def test_whoever_looks_sees_which_head_drafts(client: httpx.Client) -> None:
    assert head(client) == {
        "generation": 0, "pinned": None, "learned": False, "trial": None, "problem": None,
    }  # fmt: skip
    client.patch(PATH, json={"generation": 1}).raise_for_status()
    text(client, 1)
    client.get(PATH).raise_for_status()
    assert head(client) | {"problem": None} == {
        "generation": 1, "pinned": 1, "learned": True, "trial": None, "problem": None,
    }  # fmt: skip
    assert metric(client, "aerie_head_generation") == 1.0
    assert metric(client, "aerie_head_draft_tokens_total") > 0
    assert metric(client, "aerie_head_swaps_total") > 0
    assert metric(client, "aerie_head_swap_seconds_count") > 0
    shown = client.get("/page/figures").json()["head"]
    assert shown["generation"] == 1
    assert {row["generation"] for row in shown["drafts"]} >= {0, 1}


@pytest.mark.parametrize("value", [2, 7, -1, "1", "newest", 1.5, True, None, [1]])
def test_other_values_are_refused_and_change_nothing(client: httpx.Client, value: Any) -> None:
    assert_error(client.patch(PATH, json={"generation": value}), 400, param="generation")
    assert head(client)["generation"] == 0


def test_a_generation_is_chosen_by_itself(client: httpx.Client) -> None:
    both = {"generation": 1, "objective": "off"}
    assert_error(client.patch(PATH, json=both), 400, param="generation")
    assert head(client)["pinned"] is None
    assert client.get(PATH).json()["objective"] == "fixed"
