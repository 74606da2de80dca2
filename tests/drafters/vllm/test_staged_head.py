"""What staging a draft head leaves on the ranks, without an engine."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.model.selector import SelectorTables
from drafters.vllm import head_swap, patches
from drafters.vllm.head_swap import HeadSwap, StagedHead
from drafters.vllm.path_selector import ServedSelector


def selector(value: float) -> ServedSelector:
    """A path selector of equal numbers."""
    module: Any = torch.nn.Linear(2, 3)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    tables = SelectorTables(torch.full((4, 6), value), torch.full((4, 3), value))
    return ServedSelector(module, tables, torch.full((5,), int(value)))


def test_a_staged_selector_leaves_the_device_where_graphs_have_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: its tables stayed on the GPU, beside their copy in the main memory."""
    loaded = list[weakref.ref[ServedSelector]]()

    def load(*_: Any) -> ServedSelector:
        found = selector(2)
        loaded.append(weakref.ref(found))
        return found

    monkeypatch.setattr(head_swap, "load_served_selector", load)
    owner: Any = SimpleNamespace(
        vllm_config=None, device=torch.device("cpu"), selector=selector(1), selector_in_graphs=True,
        head_changed=lambda: None,
    )  # fmt: skip
    staged = object.__new__(StagedHead)
    staged._owner, staged._target, staged._twin = owner, None, None
    staged._folder, staged._pairs = Path(), []
    staged._config = SimpleNamespace(path_selector=object())  # type: ignore[assignment]
    staged.selector, staged._selector_loaded = None, False
    staged.load_selector()
    gc.collect()
    assert [found() for found in loaded] == [None]
    in_graphs = owner.selector
    for value in (2, 1):
        staged.exchange()
        assert owner.selector is in_graphs
        assert all(bool((tensor == value).all()) for tensor in in_graphs.tensors())


class Rank(HeadSwap):
    """A worker on which a head is staged without files."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.model_runner = SimpleNamespace(own_drafter=object())

    def aerie_stage_head(self, name: str) -> dict[str, Any] | None:
        self._staged = SimpleNamespace(name=name, load_selector=self._load)  # type: ignore[assignment]
        return {"seconds": 0.1}

    def _load(self) -> None:
        if self.problem is not None:
            raise OSError(self.problem)


def test_a_head_that_one_rank_refuses_is_staged_on_none() -> None:
    """Catches: the next time only the rank that had refused it would stage it, and wait forever for
    the others to read the target's embeddings with it."""
    ranks = [Rank(), Rank("no memory")]
    executor = SimpleNamespace(
        collective_rpc=lambda method, args: [getattr(rank, method)(*args) for rank in ranks]
    )
    core = SimpleNamespace(model_executor=executor)
    assert patches.head(core, "stage", "/head") == {"error": "/head: no memory"}
    assert [rank._staged for rank in ranks] == [None, None]
    ranks[1].problem = None
    assert patches.head(core, "stage", "/head")["seconds"] > 0
    assert all(rank._staged is not None for rank in ranks)
