"""The path selector of a P-EAGLE head in an engine, with tables of the target's embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from drafters.model.checkpoint import load_selector
from drafters.model.config import HeadConfig
from drafters.model.head_check import SELECTOR_FILE
from drafters.model.selector import PathSelector, Pick, SelectorTables

_CHUNK = 8192  # rows of the target's embeddings that are copied at a time


@dataclass(frozen=True)
class ServedSelector:
    """A path selector, and what is needed to serve with it."""

    module: PathSelector
    tables: SelectorTables
    draft_ids: torch.Tensor | None  # [target vocabulary], where the head's ids are others

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that the selector computes with, in an order that two of one kind share."""
        yield from (parameter.data for parameter in self.module.parameters())
        yield from (self.tables.before, self.tables.candidate)
        if self.draft_ids is not None:
            yield self.draft_ids

    def to_draft(self, tokens: torch.Tensor) -> torch.Tensor:
        """The head's ids of draft tokens, which have the target's: int64, any shape."""
        return tokens if self.draft_ids is None else self.draft_ids[tokens]

    def walk(
        self,
        states: torch.Tensor,  # [n, positions, hidden]
        logits: torch.Tensor,  # [n, positions, draft vocabulary]
        first: torch.Tensor,  # [n]
        pick: Pick | None = None,
    ) -> torch.Tensor:
        """Choose the draft tokens behind `first`, as `PathSelector.walk` does: `[n, positions]`."""
        return self.module.walk(self.tables, states, logits, first, pick)


@torch.inference_mode()
def load_served_selector(
    vllm_config: VllmConfig,
    target_model: Any,
    head: Any,
    device: torch.device,
    folder: Path | None = None,
) -> ServedSelector | None:
    """Load the path selector of the engine's draft head, or of the one in `folder`, in the head's
    dtype; None where its config.json has none.

    `head` is vLLM's model of the head, `target_model` that of the target, on every rank. Raises
    OSError and ValueError for a selector that cannot be read, and ValueError for a target whose
    embeddings are on another pipeline stage.
    """
    config = vllm_config.speculative_config.draft_model_config
    model, revision = (config.model, config.revision) if folder is None else (str(folder), None)
    document = get_hf_file_to_dict("config.json", model, revision) or {}
    if document.get("path_selector") is None:
        return None
    depth = vllm_config.model_config.get_total_num_hidden_layers()
    head_config = HeadConfig.from_json(document, depth)
    module = load_selector(head_folder(model, revision, SELECTOR_FILE), head_config)
    assert module is not None  # config.json has one
    module = module.to(device=device, dtype=config.dtype)
    drafts = head_config.draft_vocab_size or head_config.vocab_size
    ids = torch.arange(drafts, device=device)
    draft_ids = None
    if head.draft_id_to_target_id is not None:
        ids = ids + head.draft_id_to_target_id.to(device)
        draft_ids = ids.new_zeros(head_config.vocab_size)
        draft_ids[ids] = torch.arange(drafts, device=device)
    embed = _embeddings(target_model)
    parts = [module.tables(embed(part).to(config.dtype)) for part in ids.split(_CHUNK)]
    tables = SelectorTables(
        torch.cat([part.before for part in parts]), torch.cat([part.candidate for part in parts])
    )
    return ServedSelector(module, tables, draft_ids)


def head_folder(model: str, revision: str | None, file: str) -> Path:
    """The folder of a head that has `file`: of a repository the snapshot in the hub's cache, into
    which the file is downloaded if it is not there."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(model, file, revision=revision))
    return path.parents[len(Path(file).parts) - 1]


def _embeddings(target_model: Any) -> Any:
    """The target's module of token embeddings, which every rank has to call with the same ids."""
    language = getattr(target_model, "get_language_model", lambda: target_model)()
    inner = language.model
    for name in ("embed_tokens", "embedding"):  # vLLM's two names
        found = getattr(inner, name, None)
        if isinstance(getattr(found, "weight", None), torch.Tensor):
            return found
    raise ValueError(
        "a path selector needs the target's embeddings, which are on another pipeline stage: set "
        "pipeline_parallel_size to 1, or serve a copy of the head without selector/ and without "
        "path_selector in its config.json"
    )
