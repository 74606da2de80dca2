"""Model cards, health, version and metrics."""

from __future__ import annotations

import re
import time

import httpx
import openai
import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from .gateway import MODEL, Gateway
from .wire import assert_error


def test_models_are_listed(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert MODEL in [m.id for m in listed]
    assert all(m.object == "model" and m.owned_by and m.created > 0 for m in listed)


def test_list_envelope(http: httpx.Client) -> None:
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    for card in body["data"]:
        Model.model_validate(card)


def test_a_model_is_retrieved(client: openai.OpenAI) -> None:
    card = client.models.retrieve(MODEL)
    assert (card.id, card.object) == (MODEL, "model")
    assert card.created > 0
    assert card.owned_by


@pytest.mark.parametrize("name", ["nope", "org/model", MODEL + "x", MODEL.upper()])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"


def test_a_very_long_model_id_is_refused(http: httpx.Client) -> None:
    assert_error(http.get("/v1/models/" + "a" * 10_000), {400, 404, 414})


def test_liveness_and_readiness(http: httpx.Client) -> None:
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").status_code == 200


def test_ping_answers_both_methods(http: httpx.Client) -> None:
    assert http.get("/ping").status_code == 200
    assert http.post("/ping").status_code == 200


def test_version(http: httpx.Client) -> None:
    body = http.get("/version").json()
    assert re.match(r"\d+\.\d+", body["version"]), body


def test_metrics_parse_and_keep_the_engine_names(http: httpx.Client) -> None:
    started = time.monotonic()
    response = http.get("/metrics")
    took = time.monotonic() - started
    assert response.headers["content-type"].startswith("text/plain")
    names = {s.name for f in text_string_to_metric_families(response.text) for s in f.samples}
    wanted = {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    }
    assert wanted <= names, wanted - names
    assert took < 2, f"a scrape took {took:.1f} s"


def test_the_log_says_once_when_it_was_ready(gateway: Gateway) -> None:
    if not gateway.owned:
        pytest.skip("the log of a gateway that already ran is not ours to read")
    lines = re.findall(r"\bready in (\d+(?:\.\d+)?) s\b", gateway.text())
    assert len(lines) == 1, lines
    assert gateway.ready_after_s is not None
    assert abs(float(lines[0]) - gateway.ready_after_s) < 15, (lines, gateway.ready_after_s)
