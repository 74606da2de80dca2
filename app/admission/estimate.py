"""Cost estimate of a request, from its body before anything is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bytes of a JSON body for one token: right for English, high for code, and about right for
# lists of token ids and for other scripts, whose characters are several bytes.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """Cost of a request: tokens to charge, and sequences that the engine will run at once."""

    tokens: int
    sequences: int


def estimate(payload: Mapping[str, Any], body_bytes: int, output_tokens: int) -> Estimate:
    """Cost of a request that generates.

    `output_tokens` is the limit of each sequence (app/validation/output_limit.py). The body is not
    validated yet: anything that is no number counts as not given.
    """
    sequences = prompts(payload) * max(1, _number(payload.get("n")) or 1)
    return Estimate(body_bytes // BYTES_PER_TOKEN + output_tokens * sequences, sequences)


def estimate_tokenizing(body_bytes: int) -> Estimate:
    """Cost of a request that only tokenises."""
    return Estimate(body_bytes // BYTES_PER_TOKEN, 1)


def prompts(payload: Mapping[str, Any]) -> int:
    """Number of prompts in the body.

    Completions take a list of texts or of token lists, and embeddings beside them.
    """
    prompt, embeddings = payload.get("prompt"), payload.get("prompt_embeds")
    count = 0
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count = len(prompt)
    elif prompt is not None:
        count = 1
    if embeddings is not None:
        count += len(embeddings) if isinstance(embeddings, list) else 1
    return max(1, count)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
