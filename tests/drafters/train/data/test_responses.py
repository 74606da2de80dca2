"""Responses equal one argmax at a time, and those of a server come through its client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from email.utils import formatdate
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from drafters.train.data.responses import (
    ResponseServerError,
    respond,
    respond_by_server,
)
from drafters.train.data.token_sequences import Text
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import Serve
from tests.drafters.train.stub_server import StubServer
from tests.drafters.train.tiny import END, load_target, write_target
from tests.waiting import IN_TIME_S

PROMPTS = [[5, 9, 2, 7], [1, 1, 8, 20, 4, 6, 13], [17, 3], [99]]


def _greedy(target: FrozenTarget, prompt: list[int], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        final = target.states(torch.tensor([tokens]), []).final[0, -1]
        tokens.append(int(target.logits(final).argmax()))
        if tokens[-1] in target.end_tokens:
            break
    return tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_greedy_equals_one_argmax_at_a_time(tmp_path: Path, kind: str) -> None:
    target = load_target(tmp_path, kind)
    # Make the third token of one answer an end token: one row ends early, the others go on.
    target.end_tokens = [_greedy(target, PROMPTS[0], 3)[-1]]
    wanted = [_greedy(target, prompt, 10) for prompt in PROMPTS]
    assert len(wanted[0]) == len(PROMPTS[0]) + 3
    assert max(len(row) - len(prompt) for row, prompt in zip(wanted, PROMPTS, strict=True)) == 10
    for batch_tokens in (1, 30, 1000):
        told: list[int] = []
        texts = dict(
            respond(target, PROMPTS, steps=10, temperature=0.0, seed=0,
                    batch_tokens=batch_tokens, progress=told.append)
        )  # fmt: skip
        assert [texts[index].tokens.tolist() for index in range(4)] == wanted
        assert [texts[index].prompt for index in range(4)] == [4, 7, 2, 1]
        assert sum(told) == sum(map(len, wanted)) - sum(map(len, PROMPTS))


def test_longest_prompts_come_first_and_batches_keep_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(tmp_path)
    shapes: list[torch.Size] = []
    generate = target.model.generate
    monkeypatch.setattr(
        target.model, "generate",
        lambda tokens, **options: shapes.append(tokens.shape) or generate(tokens, **options),
    )  # fmt: skip
    texts = list(respond(target, PROMPTS, steps=3, temperature=0.0, seed=0, batch_tokens=16))
    assert [index for index, _ in texts] == [1, 0, 2, 3]
    assert shapes == [(1, 7), (2, 4), (1, 1)]


def test_the_checkpoints_sampling_defaults_are_not_inherited(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    plain = FrozenTarget.load(folder)
    wanted = [_greedy(plain, prompt, 8) for prompt in PROMPTS]
    hindered = GenerationConfig(
        do_sample=True, top_k=1, repetition_penalty=50.0, suppress_tokens=[wanted[0][4]],
        min_new_tokens=8, eos_token_id=END,
    )  # fmt: skip
    hindered.save_pretrained(folder)
    target = FrozenTarget.load(folder)
    texts = dict(respond(target, PROMPTS, steps=8, temperature=0.0, seed=0))
    assert [texts[index].tokens.tolist() for index in range(4)] == wanted
    # top_k = 1 would make every sample the greedy text.
    sampled = dict(respond(target, PROMPTS, steps=8, temperature=1.5, seed=0))
    assert [sampled[index].tokens.tolist() for index in range(4)] != wanted


def test_samples_have_the_targets_distribution(tmp_path: Path) -> None:
    target, count, temperature = load_target(tmp_path), 4000, 3.0
    texts = respond(target, [[5, 9]] * count, steps=1, temperature=temperature, seed=1)
    drawn = Counter(int(text.tokens[2]) for _, text in texts)
    logits = target.logits(target.states(torch.tensor([[5, 9]]), []).final[0, -1])
    chances = (logits / temperature).softmax(-1)
    observed = torch.tensor([drawn[token] / count for token in range(len(chances))])
    # Far beyond the first fifty tokens, where a default top_k would cut.
    assert len(drawn) > 60
    assert (observed - chances).abs().sum() < 1.6 * (chances / count).sqrt().sum()


def test_stop_tokens_end_a_text_besides_the_targets_own(tmp_path: Path) -> None:
    target = load_target(tmp_path)
    stop = _greedy(target, PROMPTS[0], 3)[-1]
    texts = respond(target, PROMPTS[:1], steps=10, temperature=0.0, seed=0, stop_tokens=[stop])
    ((_, text),) = texts
    assert text.tokens.tolist() == _greedy(target, PROMPTS[0], 3)


def test_min_p_leaves_out_the_unlikely(tmp_path: Path) -> None:
    target = load_target(tmp_path)
    chances = target.logits(target.states(torch.tensor([[5, 9]]), []).final[0, -1]).softmax(-1)
    likely = {int(token) for token in (chances >= 0.5 * chances.max()).nonzero()}
    texts = respond(target, [[5, 9]] * 500, steps=1, temperature=1.0, seed=1, min_p=0.5)
    assert {int(text.tokens[2]) for _, text in texts} <= likely
    assert 1 < len(likely) < 250


def test_a_seed_repeats_and_the_callers_random_state_stays(tmp_path: Path) -> None:
    target = load_target(tmp_path)

    def rows(seed: int) -> list[list[int]]:
        texts = respond(target, PROMPTS, steps=6, temperature=1.0, seed=seed, batch_tokens=20)
        return [text.tokens.tolist() for _, text in texts]

    torch.manual_seed(7)
    wanted = torch.rand(1)
    torch.manual_seed(7)
    first = rows(1)
    assert torch.equal(torch.rand(1), wanted)
    assert rows(1) == first
    assert rows(2) != first


@pytest.mark.parametrize(
    ("prompts", "steps", "reason"),
    [
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1]], 0, "at least one step"),
        ([[1] * 100], 29, "exceed the target's 128 positions"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    tmp_path: Path, prompts: list[list[int]], steps: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        list(respond(load_target(tmp_path), prompts, steps=steps, temperature=0.0, seed=0))


def _texts(
    server: StubServer, prompts: list[list[int]] = PROMPTS, **options: object
) -> dict[int, Text]:
    settings = {"steps": 5, "temperature": 0.0, "seed": 3, **options}
    return dict(respond_by_server(server.url, None, prompts, **settings))  # type: ignore[arg-type]


def _completion(body: dict) -> dict:
    return {"choices": [{"text": "", "token_ids": [sum(body["prompt"]), END]}]}


def test_the_server_gets_token_ids_and_every_default_spelt_out(serve: Serve) -> None:
    server, told = serve(lambda body, attempt: (200, {}, _completion(body))), []
    texts = dict(
        respond_by_server(
            server.url + "/v1/", "me", PROMPTS, steps=5, temperature=0.7, seed=3, key="secret",
            progress=told.append,
        )
    )  # fmt: skip
    for index, prompt in enumerate(PROMPTS):
        assert texts[index].tokens.tolist() == [*prompt, sum(prompt), END]
        assert texts[index].prompt == len(prompt)
    assert told == [2, 2, 2, 2]
    body = next(body for body in server.bodies if body["prompt"] == PROMPTS[1])
    assert body == {
        "model": "me", "prompt": PROMPTS[1], "max_tokens": 5, "temperature": 0.7, "top_k": 0,
        "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 4,
        "return_token_ids": True,
    }  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert {headers["path"] for headers in server.headers} == {"/v1/completions"}


def test_a_busy_server_is_asked_again_after_the_time_it_names(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, sleep = list[float](), asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    past = formatdate(time.time() - 10, usegmt=True)
    waits = [(429, {"Retry-After": "0.4"}, {}), (503, {"Retry-After": past}, {})]

    def answer(body: dict, attempt: int) -> tuple[int, dict[str, str], object]:
        return waits[attempt] if attempt < 2 else (200, {}, _completion(body))

    server = serve(answer)
    assert len(_texts(server, PROMPTS[:1])) == 1
    assert slept == [0.4, 0.0]


def test_without_retry_after_waits_double_and_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.train.data.responses._BACKOFF", (0.05, 0.1))
    monkeypatch.setattr("drafters.train.data.responses._PATIENCE", 0.3)
    server = serve(lambda body, attempt: (503, {}, {}))
    with pytest.raises(ResponseServerError, match="still 503 after 0 s"):
        _texts(server, PROMPTS[:1])
    assert len(server.bodies) == 4  # waits of 0.05, 0.1, 0.1; a fourth would pass 0.3


def test_the_server_is_told_of_min_p_and_stop_tokens(serve: Serve) -> None:
    server = serve(lambda body, attempt: (200, {}, _completion(body)))
    _texts(server, PROMPTS[:1], temperature=1.0, min_p=0.05, stop_tokens=[7, 9])
    assert (server.bodies[0]["min_p"], server.bodies[0]["stop_token_ids"]) == (0.05, [7, 9])


def test_requests_run_together_and_no_more_than_asked(serve: Serve) -> None:
    together = threading.Barrier(3, timeout=IN_TIME_S)

    def answer(body: dict, attempt: int) -> tuple[int, dict[str, str], object]:
        together.wait()
        return 200, {}, _completion(body)

    server = serve(answer)
    prompts = [[index] for index in range(12)]
    assert sorted(_texts(server, prompts, concurrency=3)) == list(range(12))
    assert server.most == 3


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (404, {"error": {"message": "no such model"}}, "status 404: .*no such model"),
        (200, {"choices": [{"text": "hi"}]}, "no token_ids"),
        (200, {"choices": [{"token_ids": ["a"]}]}, "no token_ids"),
        (200, {"choices": []}, "not a completion"),
        (200, ["hi"], "not a completion"),
    ],
)
def test_other_answers_are_errors_that_say_what_came(
    serve: Serve, status: int, document: object, reason: str
) -> None:
    server = serve(lambda body, attempt: (status, {}, document))
    with pytest.raises(ResponseServerError, match=reason):
        _texts(server)


def test_no_server_is_an_error_that_names_the_address() -> None:
    with pytest.raises(
        ResponseServerError, match=r"http://127\.0\.0\.1:9/v1/completions: ConnectError"
    ):
        list(respond_by_server("http://127.0.0.1:9", None, [[1]], steps=1, temperature=0, seed=0))


def test_a_caller_may_stop_early(serve: Serve) -> None:
    server = serve(lambda body, attempt: (200, {}, _completion(body)))
    texts = respond_by_server(
        server.url, None, [[index] for index in range(50)], steps=1, temperature=0.0, seed=0,
        concurrency=2,
    )  # fmt: skip
    next(texts)
    texts.close()  # type: ignore[attr-defined]
    assert len(server.bodies) < 50


def test_only_this_machine_is_asked_past_a_proxy(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the proxy of the environment got the requests, and the server's key with them."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody listens there
    server = serve(lambda body, attempt: (200, {}, _completion(body)))
    assert len(_texts(server, [[1]])) == 1
