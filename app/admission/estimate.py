"""Cost estimate of a request, from its body before anything is tokenised."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a JSON body for one token: right for English, high for code, and about right for
# lists of token ids and for other scripts, whose characters are several bytes.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """Cost of a request: tokens to charge, and sequences that the engine will run at once."""

    tokens: int
    sequences: int


def estimate(body_bytes: int, output_tokens: int, sequences: int) -> Estimate:
    """Cost of a request that generates `sequences`, each of which has the limit `output_tokens`
    (app/validation/output_limit.py)."""
    return Estimate(body_bytes // BYTES_PER_TOKEN + output_tokens * sequences, sequences)


def estimate_tokenizing(body_bytes: int) -> Estimate:
    """Cost of a request that only tokenises."""
    return Estimate(body_bytes // BYTES_PER_TOKEN, 1)
