"""The gateway as SageMaker starts it: `serve`, nothing but SM_VLLM_ variables, port and /ping."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from app.settings import REPOSITORY
from tests.ports import reserved_port

from .gateway import Gateway
from .wire import metric

pytestmark = pytest.mark.slow

MODELS = REPOSITORY / "models" / "embedded"
K = 4
BODY = {"prompt": "def read_config(path):\n", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    port = reserved_port()  # 8080 unless a variable says otherwise; here others may have it
    head = {
        "method": "eagle3",
        "model": str(MODELS / "p-eagle"),
        "num_speculative_tokens": K,
        "parallel_drafting": True,
    }
    variables = {
        "SM_VLLM_MODEL": str(MODELS / "target"),
        "SM_VLLM_SPECULATIVE_CONFIG": json.dumps(head),
        "SM_VLLM_SERVED_MODEL_NAME": "mine",
        "SM_VLLM_MAX_MODEL_LEN": "1k",
        "SM_VLLM_MAX_NUM_SEQS": "8",
        "SM_VLLM_DTYPE": "float",
        "SM_VLLM_KV_CACHE_MEMORY_BYTES": str(256 * 2**20),
        "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_ENABLE_PREFIX_CACHING": "false",
        "SM_VLLM_PORT": str(port),
    }
    log = tmp_path_factory.mktemp("sagemaker") / "gateway.log"
    started = Gateway.start(port, log, [], variables)
    with started.serving() as gateway:
        yield gateway


@pytest.fixture(scope="module")
def sagemaker(endpoint: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=endpoint.url, timeout=60, trust_env=False) as client:
        yield client


def test_ping_is_503_until_the_head_is_proven(endpoint: Gateway, sagemaker: httpx.Client) -> None:
    early = endpoint.while_starting["GET /ping"]
    assert {response.status_code for response in early} == {503}
    answer = sagemaker.get("/ping")
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_variables_are_in_force(sagemaker: httpx.Client) -> None:
    (card,) = sagemaker.get("/v1/models").json()["data"]
    assert card["id"] == "mine"
    state = sagemaker.get("/v1/speculation").json()
    assert state["enabled"] is True and state["k_max"] == K
    tokens = sagemaker.post("/tokenize", json={"model": "mine", "prompt": "a"}).json()
    assert tokens["max_model_len"] == 1000


def test_invocations_answer_plain_and_streamed_and_draft(sagemaker: httpx.Client) -> None:
    drafted = metric(sagemaker, "vllm:spec_decode_num_draft_tokens_total")
    answer = sagemaker.post("/invocations", json=BODY)
    assert answer.status_code == 200, answer.text
    whole = answer.json()["choices"][0]["text"]
    assert whole
    pieces = []
    with sagemaker.stream("POST", "/invocations", json={**BODY, "stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole
    assert metric(sagemaker, "vllm:spec_decode_num_draft_tokens_total") > drafted
