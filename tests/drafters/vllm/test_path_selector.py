"""An engine's path selector is that of the checkpoint, with the target's embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.model.checkpoint import save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.vllm import path_selector
from drafters.vllm.path_selector import load_served_selector

CPU = torch.device("cpu")


def engine(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What is read of a VllmConfig."""
    draft = SimpleNamespace(model=str(folder), revision=None, dtype=dtype)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 8),
    )


def target(embeddings: torch.Tensor | None) -> Any:
    """What is read of vLLM's model of a target; None: the embeddings are on another stage."""
    inner = SimpleNamespace(embed_tokens=torch.nn.Identity())
    if embeddings is not None:
        inner.embed_tokens = torch.nn.Embedding.from_pretrained(embeddings)
    language = SimpleNamespace(model=inner)
    return SimpleNamespace(get_language_model=lambda: language)


def saved_head(config: HeadConfig, folder: Path, draft_vocabulary: int | None) -> DraftHead:
    torch.manual_seed(0)
    head = DraftHead(replace(config, draft_vocab_size=draft_vocabulary), own_lm_head=True)
    if draft_vocabulary:
        head.set_draft_vocabulary(torch.randperm(40)[:draft_vocabulary].sort().values)
    head.share(embeddings=torch.randn(40, 16), lm_head=torch.zeros(0, 16))
    for parameter in head.add_selector(SelectorConfig(4)).parameters():
        torch.nn.init.normal_(parameter)
    save_head(head, folder)
    return head


@pytest.mark.parametrize("draft_vocabulary", [None, 25])
@torch.no_grad()
def test_tables_are_those_of_the_head(
    config: HeadConfig, tmp_path: Path, draft_vocabulary: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(path_selector, "_CHUNK", 7)
    head = saved_head(config, tmp_path, draft_vocabulary)
    offsets = head.d2t if draft_vocabulary else None
    model = SimpleNamespace(draft_id_to_target_id=offsets)
    embeddings = head._shared["embeddings"]
    served = load_served_selector(engine(tmp_path), target(embeddings), model, CPU)
    assert served is not None
    expected = head.selector_tables()
    torch.testing.assert_close(served.tables.before, expected.before)
    torch.testing.assert_close(served.tables.candidate, expected.candidate)
    drafts = torch.arange(draft_vocabulary or 40)
    assert torch.equal(served.to_draft(head.to_target(drafts)), drafts)
    half = load_served_selector(engine(tmp_path, torch.bfloat16), target(embeddings), model, CPU)
    assert half is not None and half.tables.before.dtype == torch.bfloat16


def test_a_head_without_one_has_none(config: HeadConfig, tmp_path: Path) -> None:
    save_head(DraftHead(config), tmp_path)
    model = SimpleNamespace(draft_id_to_target_id=None)
    assert load_served_selector(engine(tmp_path), target(None), model, CPU) is None


def test_what_cannot_be_read_says_so(config: HeadConfig, tmp_path: Path) -> None:
    saved_head(config, tmp_path, None)
    model = SimpleNamespace(draft_id_to_target_id=None)
    with pytest.raises(ValueError, match="set pipeline_parallel_size to 1"):
        load_served_selector(engine(tmp_path), target(None), model, CPU)
    (tmp_path / "selector" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks selector\.before\.weight"):
        load_served_selector(engine(tmp_path), target(torch.zeros(40, 16)), model, CPU)
