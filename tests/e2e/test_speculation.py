"""GET and PATCH /v1/speculation on a live engine: what is drafted follows at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from drafters.control.report import PHASES

from .bodies import greedy
from .gateway import MODEL
from .prompts import PROMPTS, REPEATED
from .wire import metric, text_of

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture
def steer(http: httpx.Client) -> Iterator[Any]:
    """PATCH; afterwards the gateway is as it was."""

    def patch(**changes: Any) -> httpx.Response:
        return http.patch("/v1/speculation", json=changes)

    yield patch
    patch(objective="throughput", sources=[]).raise_for_status()


def text(http: httpx.Client, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 48}
    return text_of(http.post("/v1/completions", json=body).raise_for_status().json())


def test_the_state_says_what_is_believed_and_done(http: httpx.Client) -> None:
    text(http, PROMPTS[0])
    state = http.get("/v1/speculation").json()
    assert state["enabled"] is True
    assert state["objective"] == "throughput"
    assert 0 <= state["k"] <= state["k_max"] == 11
    assert [entry["position"] for entry in state["acceptance"]] == list(range(1, 12))
    assert all(entry["step_seconds"] > 0 for entry in state["costs"])
    assert set(state["speedup"]) == {"1m", "5m", "15m"}
    assert state["totals"]["tokens"] > 0


def test_a_pinned_k_is_drafted_from_the_next_step_on(http: httpx.Client, steer: Any) -> None:
    texts, accepted = set(), metric(http, ACCEPTED)
    for k in (5, 2, 1):
        state = steer(objective="fixed", k=k).json()
        assert (state["objective"], state["k_max"]) == ("fixed", 11)
        before = metric(http, DRAFTS), metric(http, DRAFTED)
        texts.add(text(http, PROMPTS[1]))
        drafts, drafted = metric(http, DRAFTS) - before[0], metric(http, DRAFTED) - before[1]
        assert drafts > 0
        assert drafted == k * drafts
    assert metric(http, ACCEPTED) > accepted
    before = metric(http, DRAFTED)
    steer(objective="off").raise_for_status()
    texts.add(text(http, PROMPTS[1]))
    assert metric(http, DRAFTED) == before
    assert len(texts) == 1  # and the text does not know


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"objective": "fixed", "k": 12}, "k"),
        ({"objective": "fixed", "k": "3"}, "k"),
        ({"k": 3}, "k"),
        ({"speed": 3}, "speed"),
        ({}, None),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(
    http: httpx.Client, steer: Any, changes: dict[str, Any], field: str | None
) -> None:
    response = steer(**changes)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert http.get("/v1/speculation").json()["objective"] == "throughput"


def test_a_request_may_bound_its_own_drafts(http: httpx.Client, steer: Any) -> None:
    steer(objective="fixed", k=5).raise_for_status()
    for field, most in (({"max_k": 2}, 2), ({"enabled": False}, 0)):
        before = metric(http, DRAFTS), metric(http, DRAFTED)
        body = {
            "model": MODEL, "prompt": PROMPTS[2], "temperature": 0, "max_tokens": 40,
            "speculation": field,
        }  # fmt: skip
        http.post("/v1/completions", json=body).raise_for_status()
        drafts, drafted = metric(http, DRAFTS) - before[0], metric(http, DRAFTED) - before[1]
        assert drafted == most * drafts
        assert (drafts > 0) == (most > 0)
    body["speculation"] = {"max_k": "two"}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculation.max_k"


def test_a_text_that_repeats_itself_is_drafted_by_lookup_alone(
    http: httpx.Client, steer: Any
) -> None:
    """Greedily and with a seed, the text is that without drafts."""
    bodies = [greedy(REPEATED, 48), greedy(REPEATED, 48, temperature=1, seed=3)]
    found = []
    for changes in ({"objective": "off"}, {"objective": "throughput", "sources": ["lookup"]}):
        before = steer(**changes).raise_for_status().json()["totals"]["sources"]
        found.append([text_of(http.post("/v1/completions", json=body).json()) for body in bodies])
        after = http.get("/v1/speculation").json()["totals"]["sources"]
        accepted = after["lookup"]["accepted"] - before["lookup"]["accepted"]
        assert (accepted > 0) == (changes["objective"] == "throughput")
        assert after["head"] == before["head"]
    assert found[0] == found[1]
    assert {"head", "lookup"} <= set(steer(sources=[]).raise_for_status().json()["sources"])
    assert steer(sources=["tree"]).status_code == 400


def test_logit_bias_and_min_p_are_served_undrafted(http: httpx.Client, steer: Any) -> None:
    steer(objective="fixed", k=5).raise_for_status()
    token = http.post("/tokenize", json={"model": MODEL, "prompt": "return"}).json()["tokens"][0]
    body = {"model": MODEL, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12}
    before = metric(http, DRAFTED)
    forced = http.post("/v1/completions", json={**body, "logit_bias": {str(token): 100}}).json()
    assert forced["choices"][0]["text"].count("return") >= 10
    http.post("/v1/completions", json={**body, "min_p": 0.5, "temperature": 1}).raise_for_status()
    assert metric(http, DRAFTED) == before


def test_a_seed_gives_the_same_text_whatever_is_drafted(http: httpx.Client, steer: Any) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[3], "temperature": 1, "seed": 7, "max_tokens": 40}
    texts = set()
    for changes in ({"objective": "fixed", "k": 5}, {"objective": "fixed", "k": 1},
                    {"objective": "off"}, {"objective": "throughput"}):  # fmt: skip
        steer(**changes).raise_for_status()
        texts |= {text_of(http.post("/v1/completions", json=body).json()) for _ in range(2)}
    assert len(texts) == 1
    other = http.post("/v1/completions", json={**body, "seed": 8}).json()
    assert text_of(other) not in texts


def test_the_policys_figures_are_on_metrics(http: httpx.Client) -> None:
    text(http, PROMPTS[4])
    page = http.get("/metrics").text
    for name in (
        "aerie_k", "aerie_steps_total", "aerie_drafts_verified_total",
        "aerie_drafts_accepted_total", "aerie_decode_seconds_total",
        "aerie_decode_seconds_without_drafts_total", "aerie_probes_total",
        "aerie_goodput_estimate_tokens_per_second",
    ):  # fmt: skip
        assert f"\n{name}" in page, name
    for phase in PHASES:
        spent = re.search(rf'^aerie_step_seconds_total{{phase="{phase}"}} (\S+)$', page, re.M)
        assert spent and float(spent[1]) > 0, phase
