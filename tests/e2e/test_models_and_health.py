"""Model cards and metrics."""

from __future__ import annotations

import re
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .gateway import MODEL, Gateway


def test_the_client_finds_the_model(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list().data]
    card = client.models.retrieve(MODEL)
    assert (card.id, card.object) == (MODEL, "model")
    assert card.created > 0
    assert card.owned_by


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/model")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert caught.value.type == "invalid_request_error"


def test_metrics_parse_and_keep_the_engine_names(http: httpx.Client) -> None:
    took = []
    for _ in range(3):  # another process may have the cores in one of them
        started = time.monotonic()
        response = http.get("/metrics")
        took.append(time.monotonic() - started)
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
    assert min(took) < 2, f"a scrape took {min(took):.1f} s"


def test_the_log_says_once_when_it_was_ready(gateway: Gateway) -> None:
    """After the head has drafted: without that proof a gateway must not become ready."""
    if not gateway.owned:
        pytest.skip("the log of a gateway that already ran is not ours to read")
    lines = re.findall(r"\bready in (\d+(?:\.\d+)?) s\b", gateway.text())
    assert len(lines) == 1, lines
    proof = r"\bdrafting proven: Eagle3\w+ drafted [1-9]\d* tokens\n(.*\n)*.*\bready in \d"
    assert re.search(proof, gateway.text()), gateway.tail()
    assert gateway.ready_after_s is not None
    assert abs(float(lines[0]) - gateway.ready_after_s) < 15, (lines, gateway.ready_after_s)
