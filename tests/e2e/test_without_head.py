"""A model without a head is served with drafts by lookup. Greedy output is the same with drafts of
a head, with drafts by lookup and without any, token by token."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from app.settings import of_preset

from .bodies import greedy
from .conftest import CLIENT_TIMEOUT_S
from .draining import assert_it_drains
from .gateway import MODEL, Gateway, without_drafts
from .prompts import PROMPTS
from .test_prefix_cache import BLOCK, cached
from .wire import JSON

PRESET = of_preset("embedded")
AT_ONCE = 8
ASKED = PROMPTS[:16]
# The embedded model continues code. This is code that repeats itself.
REPEATING = "\n".join(
    [
        "class Shape:",
        *(
            f"    def set_{name}(self, value):\n"
            f"        if value < 0:\n"
            f'            raise ValueError("{name} must not be negative")\n'
            f"        self.{name} = value\n"
            for name in ("width", "height", "depth", "left", "right", "top")
        ),
        "    def set_",
    ]
)


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The embedded model without its head; all else as in its preset, but compilation."""
    arguments = [
        *("--model", PRESET.model.model, "--served-model-name", MODEL, "--dtype", "float32"),
        *("--kv-cache-gib", "1", "--engine-args", json.dumps(PRESET.engine.engine_args)),
        "--enforce-eager",
    ]
    log = tmp_path_factory.mktemp("headless") / "gateway.log"
    with Gateway.launch(log, arguments, preset=None).serving() as gateway:
        yield gateway


@pytest.fixture(scope="module")
def headless_http(headless: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=headless.url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as client:
        yield client


def completion(http: httpx.Client, prompt: str, tokens: int = 128) -> list[int]:
    body = greedy(prompt, max_tokens=tokens, return_token_ids=True)
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def sources(http: httpx.Client) -> JSON:
    """Draft tokens that were verified and accepted, by source."""
    state: JSON = http.get("/v1/speculation").json()
    found: JSON = state["totals"]["sources"]
    return found


def test_it_says_what_it_has(headless: Gateway, headless_http: httpx.Client) -> None:
    state = headless_http.get("/v1/speculation").json()
    assert state["enabled"] is True and state["k_max"] == 0
    assert state["available_sources"] == ["lookup", "grammar"]
    ready = headless_http.get("/readyz").json()["drafter"]
    assert (ready["proposer"], ready["head"], ready["k"]) == ("LookupProposer", None, 10)
    log = headless.text()
    assert "drafting proven: lookup drafted" in log and "`aerie train` makes a head" in log


def test_a_fixed_k_is_a_heads(headless_http: httpx.Client) -> None:
    change = {"objective": "fixed", "k": 3}
    response = headless_http.patch("/v1/speculation", json=change)
    assert response.status_code == 400 and response.json()["error"]["param"] == "k"


def test_text_that_repeats_itself_is_looked_up(headless_http: httpx.Client) -> None:
    with without_drafts(headless_http):
        plain = completion(headless_http, REPEATING)
    completion(headless_http, REPEATING)  # what steps cost is learnt
    before = sources(headless_http)["lookup"]
    assert completion(headless_http, REPEATING) == plain
    after = sources(headless_http)["lookup"]
    assert after["accepted"] - before["accepted"] >= 20


def explain(headless_http: httpx.Client, number: int, drafted: list[int], plain: list[int]) -> str:
    """Where two outputs part, and how far apart the plain model holds the two candidates there."""
    at = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a != b)
    prompt = headless_http.post("/tokenize", json={"model": MODEL, "prompt": ASKED[number]}).json()[
        "tokens"
    ]
    body = greedy(prompt + plain[:at], max_tokens=1, logprobs=5, return_tokens_as_token_ids=True)
    answer: JSON = headless_http.post("/v1/completions", json=body).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    ours, theirs = (top.get(f"token_id:{t}") for t in (drafted[at], plain[at]))
    gap = "beyond the top five" if ours is None or theirs is None else f"{theirs - ours:.6f}"
    tokens = f"{drafted[at]} with drafts, {plain[at]} without"
    return f"prompt {number}, position {at}: {tokens}; logprob gap {gap}"


@pytest.mark.usefixtures("fixed_k")
def test_greedy_output_is_the_same_whatever_drafts(
    http: httpx.Client, headless_http: httpx.Client
) -> None:
    """Batches differ, too: requests begin and end when others are in the middle."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with without_drafts(headless_http):
            plain = list(pool.map(partial(completion, headless_http), ASKED))
        by_source = {
            "head": list(pool.map(partial(completion, http), ASKED)),
            "lookup": list(pool.map(partial(completion, headless_http), ASKED)),
        }
    assert len(plain) == 16 and {len(text) for text in plain} == {128}
    reports = [
        f"{source}: {explain(headless_http, number, drafted, plain[number])}"
        for source, texts in by_source.items()
        for number, drafted in enumerate(texts)
        if drafted != plain[number]
    ]
    assert not reports, "\n".join([f"{len(reports)} outputs differ:", *reports])


def test_forced_spans_need_no_head(headless_http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {
            "customer_name": {"enum": ["positive", "negative"]},
            "total_amount_in_euro": {"type": "boolean"},
            "category_of_the_item": {"type": "boolean"},
        },
        "required": ["customer_name", "total_amount_in_euro", "category_of_the_item"],
        "additionalProperties": False,
    }
    body = {
        "model": MODEL, "prompt": "The customer:\n", "temperature": 0, "max_tokens": 100,
        "structured_outputs": {"json": schema},
    }  # fmt: skip

    def text() -> str:
        answer = headless_http.post("/v1/completions", json=body).json()
        return str(answer["choices"][0]["text"])

    with without_drafts(headless_http):
        plain = text()
    before = sources(headless_http)["grammar"]
    assert text() == plain and set(json.loads(plain)) == set(schema["required"])
    after = sources(headless_http)["grammar"]
    assert after["accepted"] - before["accepted"] >= 5


def test_text_that_does_not_repeat_itself_has_no_drafts(headless_http: httpx.Client) -> None:
    """One answer token can follow no repetition that it made itself."""
    words = "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima"
    before = sources(headless_http)["lookup"]["drafted"]
    completion(headless_http, words, tokens=2)
    assert sources(headless_http)["lookup"]["drafted"] == before


def test_without_drafts_as_much_of_a_prompt_is_cached(headless_http: httpx.Client) -> None:
    prompt = [3000 + place * 13 % 700 for place in range(3 * BLOCK + 1)]
    with without_drafts(headless_http):
        assert [cached(headless_http, prompt) for _ in range(2)] == [0, 3 * BLOCK]


def test_sigterm_lets_a_stream_finish(headless: Gateway) -> None:
    """The last test of this gateway."""
    assert_it_drains(headless, signal.SIGTERM)
