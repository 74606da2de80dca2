"""The corrections of vLLM: each test shows the fault it mends."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform

from drafters.vllm import compat

TEMPERATURES = torch.tensor([0.0, 1.5, 0.0, 0.7])
ENDS = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # the third request has no draft
EXPANDED = torch.tensor([1.0, 1.0, 1.5, 1.5, 1.5, 0.7])


def test_values_are_expanded_replaced_and_keep_their_type() -> None:
    got = compat.expand_batch_to_tokens(TEMPERATURES, ENDS, 6, replace_from=0, replace_to=1)
    assert torch.equal(got, EXPANDED)
    assert got.dtype == torch.float32
    top_k = compat.expand_batch_to_tokens(torch.tensor([3, 7], dtype=torch.int32), ENDS[:2], 5)
    assert torch.equal(top_k, torch.tensor([3, 3, 7, 7, 7], dtype=torch.int32))


def test_an_empty_batch_expands_to_nothing() -> None:
    empty = compat.expand_batch_to_tokens(torch.empty(0), torch.empty(0, dtype=torch.int32), 0)
    assert empty.shape == (0,)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build has the fault")
def test_the_sampler_uses_the_correction() -> None:
    """Fails if vLLM renames the function, which would bring the fault back unseen."""
    from vllm.v1.sample import rejection_sampler

    compat.apply()
    got = rejection_sampler.expand_batch_to_tokens(TEMPERATURES, ENDS, 6, 0, 1)
    assert torch.equal(got, EXPANDED)


def test_applying_twice_changes_nothing() -> None:
    compat.apply()
    load = torch.compiler.load_compiled_function
    compat.apply()
    assert torch.compiler.load_compiled_function is load


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"0\.33\.0"):
        compat.apply()
