"""Greedy answers of one gateway, with drafts and without, as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.load.client import Client
from bench.workloads.prompt import CHAT, COMPLETIONS
from drafters.train.data.humaneval import Problem, chat_prompt

NO_DRAFTS = {"speculation": {"enabled": False}}
LIKELIEST = 5  # log-probabilities asked for where two answers differ; a tie needs the first two
_TOKEN_ID = "token_id:"  # what vLLM puts before a token's number in `return_tokens_as_token_ids`


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one problem."""

    text: str
    tokens: list[int]  # the end token included, if it was reached
    prompt_tokens: list[int]
    finish_reason: str


async def ask(
    client: Client, model: str, problem: Problem, *, max_tokens: int, drafts: bool
) -> Answer:
    """Have a problem answered greedily. Raises RuntimeError if the server fails or sends no token
    ids."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": chat_prompt(problem)}],
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **_greedy(drafts),
    }
    found = await client.json("POST", CHAT, body)
    try:
        choice = found["choices"][0]
        return Answer(
            text=choice["message"]["content"] or "",
            tokens=list(choice["token_ids"]),
            prompt_tokens=list(found["prompt_token_ids"]),
            finish_reason=choice["finish_reason"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise RuntimeError(f"{problem.task_id}: the server's answer lacks {error}") from None


async def likeliest(client: Client, model: str, tokens: list[int]) -> dict[int, float]:
    """Log-probabilities of the most probable next tokens after `tokens`, computed without drafts.

    Raises RuntimeError if the server sends none.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": tokens,
        "max_tokens": 1,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,
        **_greedy(drafts=False),
    }
    found = await client.json("POST", COMPLETIONS, body)
    try:
        top = found["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix(_TOKEN_ID)): float(value) for name, value in top.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"no log-probabilities in an answer of the server: {error}") from None


def _greedy(drafts: bool) -> dict[str, Any]:
    return {
        "temperature": 0,
        # Overrides one in the checkpoint's generation_config.json, with which text is not greedy.
        "repetition_penalty": 1.0,
        # Else the second answer would find the first one's prefix cached, and its prefill would
        # have another shape.
        "cache_salt": "drafts" if drafts else "no drafts",
        **({} if drafts else NO_DRAFTS),
    }
