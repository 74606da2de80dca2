"""Greedy answers of one gateway, with drafts and without, as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.load.client import Client
from bench.workloads.prompt import CHAT
from drafters.train.data.humaneval import Problem, chat_prompt

NO_DRAFTS = {"speculation": {"enabled": False}}
LIKELIEST = 5  # log-probabilities asked for with each token; a tie needs the first two
_TOKEN_ID = "token_id:"  # what vLLM puts before a token's number in `return_tokens_as_token_ids`


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one problem."""

    text: str
    tokens: list[int]  # the end token included, if it was reached
    prompt_tokens: list[int]
    finish_reason: str
    # Without drafts, for each token: the most probable ones in the pass that chose it, and their
    # log-probabilities. Empty with drafts.
    likeliest: list[dict[int, float]]


async def ask(
    client: Client, model: str, problem: Problem, *, max_tokens: int, drafts: bool
) -> Answer:
    """Have a problem answered greedily. Raises RuntimeError if the server fails, or sends no token
    ids or log-probabilities."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": chat_prompt(problem)}],
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **_greedy(drafts),
    }
    if not drafts:
        body |= {"logprobs": True, "top_logprobs": LIKELIEST, "return_tokens_as_token_ids": True}
    found = await client.json("POST", CHAT, body)
    try:
        choice = found["choices"][0]
        tops = [] if drafts else [item["top_logprobs"] for item in choice["logprobs"]["content"]]
        return Answer(
            text=choice["message"]["content"] or "",
            tokens=list(choice["token_ids"]),
            prompt_tokens=list(found["prompt_token_ids"]),
            finish_reason=choice["finish_reason"],
            likeliest=[
                {int(each["token"].removeprefix(_TOKEN_ID)): float(each["logprob"]) for each in top}
                for top in tops
            ],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(f"{problem.task_id}: the server's answer lacks {error}") from None


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
