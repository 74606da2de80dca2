"""Replace the weights of the draft head between two steps, without a restart.

The new head is staged first: its files are read and checked, loaded by vLLM's own loaders into a
twin of the head, and prepared as vLLM prepares weights for its kernels. Nothing of the head in
force changes meanwhile, so that a head that does not fit is refused and nothing has happened.
Then the contents of the two are exchanged: tensors and the handles of CPU kernels keep their place,
which compiled models and CUDA graphs know, and the twin holds the head that was in force, ready to
be exchanged again.

The head's keys and values of running requests and of cached prefixes stay as they are, written by
the head before. Every draft is verified, so that no text depends on them
(docs/decisions/0032-heads-are-swapped.md).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import fields
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol

import torch
from vllm._custom_ops import CPUDNNLGEMMHandler
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from drafters.model.checkpoint import stored_tensors
from drafters.model.config import HeadConfig
from drafters.model.head_check import SELECTOR
from drafters.model.head_values import head_problems
from drafters.vllm.path_selector import ServedSelector, head_folder, load_served_selector
from drafters.vllm.v1 import bf16_head
from drafters.vllm.v1.huge_pages import collapse

logger = logging.getLogger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]  # in force, and its counterpart in the twin
FIRST_HEAD = ""  # stands for the folder of the head that the engine was started with
FIRST_HEAD_NAME = "the head that the engine was started with"
HUGE_PAGES_S = 5.0  # the most seconds for moving a staged head to huge pages, beside the steps
# What a head has of its own or borrows from the target: module of vLLM's head -> stored tensor.
_BORROWED = {"lm_head": "lm_head.weight", "model.embed_tokens": "embed_tokens.weight"}
_MASK = "mask_hidden"  # the only buffer of a head that a checkpoint fills
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class HeadOwner(Protocol):
    """A drafter or speculator of this project, as far as its head is concerned."""

    model: Any  # vLLM's model of the head
    lm_head: Any  # what makes the logits of drafts: the model's own, or its twin in bfloat16
    vllm_config: Any
    device: torch.device
    selector: ServedSelector | None
    selector_in_graphs: bool  # whether CUDA graphs hold the path selector's tensors

    def head_changed(self) -> None:
        """Make anew, in place, what is made of the head's weights when it is loaded."""
        ...


class StagedHead:
    """A head that can be exchanged with the one in force."""

    def __init__(self, owner: HeadOwner, target: Any, name: str) -> None:
        """Read, check and load the head in the folder `name` beside the one in force.

        `target` is vLLM's model of the target. Raises ValueError and OSError, which say why the
        head cannot take the place of the one in force; nothing has changed then.
        """
        self.name = name
        self._owner, self._target = owner, target
        draft = owner.vllm_config.speculative_config.draft_model_config
        self._folder = Path(name or head_folder(draft.model, draft.revision, "config.json"))
        weights = stored_tensors(self._folder)
        shared = _shared(owner.model, target)
        self._config = _checked(owner, self._folder, weights, shared)
        own = {
            name: tensor
            for name, tensor in weights.items()
            if not name.startswith(f"{SELECTOR}.")
            and name not in {_BORROWED[module] for module in shared}
        }
        modules: list[tuple[Any, Any]] = []
        self._twin = _blank_twin(owner.model, {id(each) for each in shared.values()}, modules)
        self._twin.load_weights(own.items())
        for _, twin in modules:
            _prepare(twin)
        self._pairs = [pair for live, twin in modules for pair in _pairs(live, twin)]
        self._lm_head: Any = None
        if owner.lm_head is not owner.model.lm_head and "lm_head" not in shared:
            self._lm_head = bf16_head.twin(self._twin.lm_head)
            self._pairs += _pairs(owner.lm_head, self._lm_head)
        self.selector: ServedSelector | None = None
        self._selector_loaded = False

    def load_selector(self) -> None:
        """Load the path selector, if the head has one. All ranks of a target call this, once the
        head is staged on each of them: the selector's tables are made of the target's embeddings.
        """
        owner = self._owner
        if self._config.path_selector is None or self._selector_loaded:
            return
        self._selector_loaded = True
        selector = load_served_selector(
            owner.vllm_config, self._target, self._twin, owner.device, self._folder
        )
        if not owner.selector_in_graphs:
            self.selector = selector
            return
        # Only a copy in the main memory stays: the device's memory is the KV cache's.
        assert owner.selector is not None and selector is not None  # `_checked`
        staged = [tensor.cpu() for tensor in selector.tensors()]
        self._pairs += zip(owner.selector.tensors(), staged, strict=True)

    @torch.inference_mode()
    def exchange(self) -> None:
        """Exchange this head with the one in force, which is the staged one from now on."""
        owner = self._owner
        for live, staged in self._pairs:
            before = live.to("cpu", copy=True)
            live.copy_(staged)
            staged.copy_(before)
        if not owner.selector_in_graphs:
            owner.selector, self.selector = self.selector, owner.selector
        owner.head_changed()


class HeadSwap:
    """Mixed into this project's worker (worker.py), and called on every rank by `head` of
    patches.py. A rank without a head answers None, and one that refuses a head says why in `error`:
    then nothing has changed on it."""

    model_runner: Any
    _staged: StagedHead | None = None
    _head_name = FIRST_HEAD  # of the head in force

    def _owner(self) -> HeadOwner | None:
        """This project's drafter or speculator; None where there is none on this rank."""
        runner = self.model_runner
        own: HeadOwner | None = getattr(runner, "own_drafter", None)
        return own or getattr(runner, "own_speculator", None)

    def aerie_stage_head(self, name: str) -> dict[str, Any] | None:
        """Stage the head in the folder `name`. The one that is staged already is not read again,
        and of the one in force there is nothing to stage."""
        began, owner = perf_counter(), self._owner()
        if owner is None:
            return None
        if name not in (self._head_name, self._staged and self._staged.name):
            self.aerie_drop_head(name)
            try:
                self._staged = StagedHead(owner, self.model_runner.get_model(), name)
            except Exception as error:
                logger.debug("head refused", exc_info=error)
                return {"error": f"{name or FIRST_HEAD_NAME}: {error}"}
            if owner.device.type == "cpu":
                Thread(target=collapse, args=(HUGE_PAGES_S,), daemon=True).start()
        return {"seconds": perf_counter() - began}

    def aerie_stage_selector(self, name: str) -> dict[str, Any] | None:
        """Load the path selector of the head `name`, which is staged on every rank."""
        began, staged = perf_counter(), self._staged
        if self._owner() is None:
            return None
        if staged is not None and staged.name == name:
            try:
                staged.load_selector()
            except Exception as error:
                self.aerie_drop_head(name)
                return {"error": f"{name or FIRST_HEAD_NAME}: {error}"}
        return {"seconds": perf_counter() - began}

    def aerie_swap_head(self, name: str) -> dict[str, Any] | None:
        """Put the staged head `name` in force, between two steps; the one that was in force is
        staged from now on."""
        began = perf_counter()
        if self._owner() is None:
            return None
        if name != self._head_name:
            if self._staged is None or self._staged.name != name:
                return {"error": f"{name}: it is not staged"}
            self._staged.exchange()
            self._head_name, self._staged.name = name, self._head_name
        return {"seconds": perf_counter() - began}

    def aerie_drop_head(self, name: str) -> dict[str, Any] | None:
        """Forget the staged head, whichever it is, and free its memory."""
        began = perf_counter()
        if self._owner() is None:
            return None
        self._staged = None
        gc.collect()  # a twin's modules and weights refer to each other
        return {"seconds": perf_counter() - began}


def _shared(head: Any, target: Any) -> dict[str, Any]:
    """The modules of a head that are the target's, by name."""
    of_target = {id(module) for module in target.modules()}
    found = {name: head.get_submodule(name) for name in _BORROWED}
    return {name: module for name, module in found.items() if id(module) in of_target}


def _checked(
    owner: HeadOwner,
    folder: Path,
    weights: dict[str, torch.Tensor],
    shared: dict[str, Any],
) -> HeadConfig:
    """The configuration of the head in `folder`. Raises ValueError for a head that is damaged, or
    that cannot take the place of the owner's."""
    config = owner.vllm_config
    depth = config.model_config.get_total_num_hidden_layers()
    new = HeadConfig.load(folder, depth)
    problems = head_problems(folder, new)
    draft = config.speculative_config.draft_model_config
    document = get_hf_file_to_dict("config.json", draft.model, draft.revision) or {}
    old = HeadConfig.from_json(document, depth)
    for field in fields(HeadConfig):
        was, found = getattr(old, field.name), getattr(new, field.name)
        if was != found and field.name != "path_selector":
            problems.append(f"{field.name} is {found}, and {was} in the head of the start")
    if owner.selector_in_graphs:
        held = None if owner.selector is None else owner.selector.module.config
        if new.path_selector != held:
            problems.append(
                f"its path selector is {new.path_selector}, and CUDA graphs hold one like {held}"
            )
    for module, name in _BORROWED.items():
        if module in shared and name in weights:
            if not _is_targets(weights[name], shared[module]):
                problems.append(f"it has {name} of its own, and the engine uses the target's")
        elif module not in shared and name not in weights:
            problems.append(f"it has no {name}, and the head of the start has")
    if problems:
        raise ValueError("; ".join(problems))
    return new


def _is_targets(stored: torch.Tensor, module: Any) -> bool:
    """Whether a stored matrix of the whole vocabulary is the target's, on this rank's rows."""
    rows = module.shard_indices
    part = stored[rows.org_vocab_start_index : rows.org_vocab_end_index]
    weight = module.weight[: len(part)].cpu()
    return part.shape == weight.shape and torch.equal(part.to(weight.dtype), weight)


def _blank_twin(module: Any, shared: Collection[int], modules: list[tuple[Any, Any]]) -> Any:
    """A copy of a module that is loaded, with parameters in the main memory as they were before
    loading; modules without parameters and those in `shared`, ids, are the same. `modules` gets
    each module that has some with its twin."""
    twin = copy(module)
    before = get_layerwise_info(module).restore_metadata[0]
    twin._parameters = {
        name: None if tensor is None else _blank(tensor, before.get(name), twin)
        for name, tensor in module._parameters.items()
    }
    twin._buffers = dict(module._buffers)
    if _MASK in twin._buffers:
        twin._buffers[_MASK] = twin._buffers[_MASK].to("cpu", copy=True)
    twin._modules = {
        name: child
        if child is None or id(child) in shared or not any(True for _ in child.parameters())
        else _blank_twin(child, shared, modules)
        for name, child in module._modules.items()
    }
    modules.append((module, twin))
    return twin


def _blank(parameter: torch.Tensor, before: torch.Tensor | None, twin: Any) -> torch.Tensor:
    """A parameter for `twin` like a loaded one was `before` loading, by the record that vLLM keeps.
    That leaves out biases, which stay what they are when vLLM prepares weights."""
    record = to_meta_tensor(parameter) if before is None else before
    with torch.device("cpu"):
        blank: torch.Tensor = restore_layer_refs(materialize_meta_tensor(record), twin)
    return blank


def _prepare(module: Any) -> None:
    """Prepare loaded weights for vLLM's kernels. Raises ValueError for quantised ones, which may be
    prepared for other devices than the main memory."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        if not isinstance(method, _PLAIN):
            raise ValueError(f"heads with {type(method).__name__} are not swapped")
        method.process_weights_after_loading(module)


def _pairs(live: Any, twin: Any) -> Iterator[Pair]:
    """The tensors of a module and of its twin that make up what they compute. Raises ValueError if
    these do not match."""
    found = [(live._parameters[name], twin._parameters[name]) for name in live._parameters]
    found += [
        (buffer, twin._buffers[name])
        for name, buffer in live._buffers.items()
        if twin._buffers[name] is not buffer
    ]
    found += _prepared(getattr(live, "cpu_linear", None), getattr(twin, "cpu_linear", None))
    seen = set[int]()
    for ours, staged in found:
        if ours is None or not ours.numel() or staged.data_ptr() in seen:
            continue
        if ours.shape != staged.shape or ours.dtype != staged.dtype:
            raise ValueError(
                f"{type(live).__name__}: {tuple(staged.shape)} of {staged.dtype} cannot take the "
                f"place of {tuple(ours.shape)} of {ours.dtype}"
            )
        seen.add(staged.data_ptr())
        yield ours.data, staged.data


def _prepared(live: Any, twin: Any) -> Iterator[tuple[Any, Any]]:
    """The tensors that two functions hold which vLLM made for its CPU kernels: weights in another
    layout, and handles of oneDNN's. Raises ValueError if the functions are not alike."""
    if live is twin:
        return
    if not isinstance(live, FunctionType) or live.__code__ is not getattr(twin, "__code__", None):
        raise ValueError(f"{twin} is not prepared like {live}")
    cells = zip(live.__closure__ or (), twin.__closure__ or (), strict=True)
    for ours, staged in ((a.cell_contents, b.cell_contents) for a, b in cells):
        if isinstance(ours, torch.Tensor):
            yield ours, staged
        elif isinstance(ours, CPUDNNLGEMMHandler):
            yield ours.handler_tensor, staged.handler_tensor
        elif isinstance(ours, FunctionType):
            yield from _prepared(ours, staged)
        elif ours != staged:
            raise ValueError(f"{staged!r} is not prepared like {ours!r}")
