"""`aerie bench proposer`: the engines that are compared."""

from __future__ import annotations

import pytest

from bench.parts.proposer import engine_arguments


@pytest.mark.parametrize("k", [3, 7])
def test_both_engines_draft_as_many_tokens_as_were_asked_for(k: int) -> None:
    """Catches: vLLM's engine drafts 10, as many as a lookup at most, and ours is steered to K."""
    for kind in ("stock", "ours"):
        assert engine_arguments(kind, k)["speculative_config"]["num_speculative_tokens"] == k
    assert "speculative_config" not in engine_arguments("plain", k)
