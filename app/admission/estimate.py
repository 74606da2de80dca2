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


def estimate(asked: Mapping[str, Any], body_bytes: int, output_tokens: int) -> Estimate:
    """Cost of a request that generates.

    `asked` holds those fields of the body that ask for several sequences: `n`, and a `prompt` that
    may be a list. `output_tokens` is the limit of each sequence (app/validation/output_limit.py).
    The body is not validated yet: anything that is no number counts as not given.
    """
    sequences = prompts(asked.get("prompt")) * max(1, _number(asked.get("n")) or 1)
    return Estimate(body_bytes // BYTES_PER_TOKEN + output_tokens * sequences, sequences)


def estimate_tokenizing(body_bytes: int) -> Estimate:
    """Cost of a request that only tokenises."""
    return Estimate(body_bytes // BYTES_PER_TOKEN, 1)


def prompts(prompt: Any) -> int:
    """Number of prompts in the field of completions, which takes a list of texts or of token lists,
    too."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
