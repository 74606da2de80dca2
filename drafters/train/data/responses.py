"""On-policy responses: the target's own continuations of prompts.

A head has to predict what the target writes; trained on other text, it would learn to predict what
the target does not say. The target generates in this process, or on a faster server.
"""

from __future__ import annotations

import argparse
import asyncio
import email.utils
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from drafters.loopback import is_loopback
from drafters.train.data.token_sequences import Text, groups_within
from drafters.train.target import FrozenTarget

BATCH_TOKENS = 65536  # padded prompt and response tokens of one generation batch
CONCURRENCY = 64  # requests in flight
KEY_VARIABLE = "OPENAI_API_KEY"  # environment variable of the server's API key
_PATIENCE = 900.0  # seconds that one request waits for a busy server in all
_BACKOFF = (1.0, 30.0)  # seconds: the first and the longest wait without a Retry-After


class ResponseServerError(RuntimeError):
    """The server cannot be used for responses; the error's text says why."""


def server_url(text: str) -> str:
    """The argument of `--server`, checked. Raises argparse.ArgumentTypeError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://127.0.0.1:8000")
    return text


def respond(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    temperature: float,
    seed: int,
    min_p: float = 0.0,
    stop_tokens: Sequence[int] = (),
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
    processor: Callable[[list[int]], LogitsProcessor] | None = None,
) -> Iterator[tuple[int, Text]]:
    """Generate up to `steps` tokens after each prompt; yields (index of the prompt, text), those of
    the longest prompts first.

    A text ends with its first end token, if it reaches one; `stop_tokens` are end tokens besides
    the target's. Temperature 0 is greedy; otherwise tokens are sampled from the whole distribution,
    or from those at least `min_p` times as probable as the most probable one. (Not by top-p, for
    which vLLM sorts the vocabulary on a CPU.) `progress` gets numbers of new tokens. `processor`
    makes what changes the logits of a batch, from the indices of its prompts. Raises ValueError for
    an empty prompt and beyond the target's positions.
    """
    lengths = _check(prompts, steps)
    limit = target.shape.max_position_embeddings
    if lengths and max(lengths) + steps > limit:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and {steps} steps exceed the target's "
            f"{limit} positions"
        )
    # Longest first: if memory is too small, the first batch says so.
    order = sorted(range(len(prompts)), key=lambda index: -lengths[index])
    padded = [lengths[index] + steps for index in order]
    for number, batch in enumerate(groups_within(order, padded, batch_tokens)):
        rows = _generate(
            target, [prompts[index] for index in batch], steps=steps, temperature=temperature,
            min_p=min_p, ends=list(dict.fromkeys([*target.end_tokens, *stop_tokens])),
            seed=seed + number, processor=None if processor is None else processor(batch),
        )  # fmt: skip
        if progress is not None:
            progress(sum(map(len, rows)))
        for index, row in zip(batch, rows, strict=True):
            yield index, _text(prompts[index], row)


def respond_by_server(
    url: str,
    model: str | None,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    temperature: float,
    seed: int,
    min_p: float = 0.0,
    stop_tokens: Sequence[int] = (),
    concurrency: int = CONCURRENCY,
    progress: Callable[[int], None] | None = None,
    key: str | None = None,
) -> Iterator[tuple[int, Text]]:
    """Do as `respond` on an OpenAI-compatible server of the same target; yields texts as they come.

    The server must return token ids (vLLM's `return_token_ids`): text would have to be tokenized
    again, and not always into the same tokens. `model` None leaves the choice to the server,
    `key` is its API key. Requests run while the caller waits for the next text. Raises
    ResponseServerError.
    """
    _check(prompts, steps)
    common = _common(model, steps, temperature, min_p, stop_tokens)
    with asyncio.Runner() as runner:
        arriving = _arriving(
            url.rstrip("/").removesuffix("/v1") + "/v1/completions",
            {} if key is None else {"Authorization": f"Bearer {key}"},
            [
                {**common, "prompt": list(prompt), "seed": seed + index}
                for index, prompt in enumerate(prompts)
            ],
            concurrency,
        )

        async def following() -> tuple[int, list[int]] | None:
            return await anext(arriving, None)

        async def close() -> None:
            await arriving.aclose()  # type: ignore[attr-defined]

        try:
            while (arrived := runner.run(following())) is not None:
                index, row = arrived
                if progress is not None:
                    progress(len(row))
                yield index, _text(prompts[index], row)
        finally:
            runner.run(close())


def _check(prompts: Sequence[Sequence[int]], steps: int) -> list[int]:
    """The prompts' lengths in tokens. Raises ValueError for an empty one or `steps` below 1."""
    if steps < 1:
        raise ValueError(f"a response needs at least one step, got {steps}")
    lengths = [len(prompt) for prompt in prompts]
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0)} is empty")
    return lengths


def _text(prompt: Sequence[int], response: Sequence[int]) -> Text:
    return Text(torch.tensor([*prompt, *response], dtype=torch.int64), len(prompt))


@torch.no_grad()
def _generate(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    temperature: float,
    min_p: float,
    ends: list[int],
    seed: int,
    processor: LogitsProcessor | None,
) -> list[list[int]]:
    """The responses to one batch, each up to and including its first end token."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    config = GenerationConfig(
        max_new_tokens=steps,
        do_sample=temperature > 0.0,
        temperature=temperature or 1.0,
        top_k=0 if temperature > 0.0 else None,  # unset would mean the library's 50
        top_p=1.0,
        min_p=min_p if temperature > 0.0 else None,
        repetition_penalty=1.0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
    )
    device = target.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = target.model.generate(
            tokens.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=None if processor is None else LogitsProcessorList([processor]),
        )
    return [_until_end(row, ends) for row in output[:, width:].tolist()]


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    first = next((place for place, token in enumerate(row) if token in ends), len(row))
    return row[: first + 1]


def _common(
    model: str | None, steps: int, temperature: float, min_p: float, stop_tokens: Sequence[int]
) -> dict[str, Any]:
    """The fields that all requests share. All sampling parameters are among them, as a server takes
    missing ones from the checkpoint's generation config."""
    body: dict[str, Any] = {
        "max_tokens": steps,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": min_p,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }
    if stop_tokens:
        body["stop_token_ids"] = list(stop_tokens)
    return body if model is None else {"model": model, **body}


async def _arriving(
    url: str, headers: dict[str, str], bodies: Sequence[dict[str, Any]], concurrency: int
) -> AsyncIterator[tuple[int, list[int]]]:
    """(index, response) as they arrive, with at most `concurrency` requests in flight."""
    limits = httpx.Limits(max_connections=concurrency)
    # Only connecting has a timeout: a long response of a busy server may take any time.
    timeout = httpx.Timeout(None, connect=30.0)
    waiting = iter(enumerate(bodies))
    running: dict[asyncio.Task[list[int]], int] = {}
    # A proxy in the environment is for other machines: it must not see this one's key.
    proxied = not is_loopback(urlsplit(url).hostname or "")
    async with httpx.AsyncClient(
        limits=limits, timeout=timeout, headers=headers, trust_env=proxied
    ) as client:
        try:
            while True:
                while len(running) < concurrency and (following := next(waiting, None)):
                    index, body = following
                    running[asyncio.create_task(_ask(client, url, body))] = index
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[int]:
    """One response's tokens; waits while the server is busy."""
    waited, backoff = 0.0, _BACKOFF[0]
    while True:
        try:
            answer = await client.post(url, json=body)
        except httpx.TransportError as error:
            raise ResponseServerError(f"{url}: {type(error).__name__}: {error}") from error
        if answer.status_code not in (429, 503):
            return _tokens(url, answer)
        wait = _retry_after(answer.headers.get("Retry-After"))
        if wait is None:
            wait, backoff = backoff, min(2 * backoff, _BACKOFF[1])
        waited += wait
        if waited > _PATIENCE:
            raise ResponseServerError(
                f"{url}: still {answer.status_code} after {waited - wait:.0f} s"
            )
        await asyncio.sleep(wait)


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, from a number of seconds or an HTTP date; None if neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, date.timestamp() - time.time())


def _tokens(url: str, answer: httpx.Response) -> list[int]:
    if answer.status_code != 200:
        raise ResponseServerError(f"{url}: status {answer.status_code}: {answer.text[:500]}")
    try:
        tokens = answer.json()["choices"][0].get("token_ids")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ResponseServerError(f"{url}: not a completion: {answer.text[:500]}") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ResponseServerError(
            f"{url}: no token_ids in the answer; is the server vLLM or Aerie?"
        )
    return tokens
