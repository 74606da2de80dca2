"""vLLM's classes of draft heads, with the faults corrected that keep some heads from loading.

The plugin registers them with vLLM (patches.py). Heads of other architectures keep vLLM's class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models import llama_eagle3, qwen3_eagle3

from drafters.vllm.v1.bf16_head import halve_linear_layers

if TYPE_CHECKING:  # mixed into it or a class like it
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM as Base
else:
    Base = object

Weights = Iterable[tuple[str, torch.Tensor]]


class _Corrections(Base):
    """Mixed into vLLM's head classes."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Build the head for as many taps as its configuration names. vLLM builds a Llama head
        without `num_aux_hidden_states` for three (model_executor/models/llama_eagle3.py): the
        weights of one with another number do not load."""
        draft = vllm_config.speculative_config.draft_model_config
        config = draft.hf_config
        taps = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        if taps and getattr(config, "num_aux_hidden_states", None) is None:
            config.num_aux_hidden_states = len(taps)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._widens_to = None if draft.quantization else draft.dtype
        halve_linear_layers(self)

    def load_weights(self, weights: Weights) -> Any:
        """Load the weights without the map from draft to target vocabulary (`d2t`) where both are
        the same. vLLM has no parameter for it there, and stops with "no module or parameter named
        'draft_id_to_target_id'". Raises ValueError if the map is not the identity then.

        Weights that are only stored in 8 bits (drafters/model/round_weights.py) are widened here:
        vLLM does the same, with a warning for each."""
        if self.draft_id_to_target_id is None:
            weights = (entry for entry in weights if not _is_idle_map(*entry))
        if self._widens_to is not None:
            weights = ((name, _widened(weight, self._widens_to)) for name, weight in weights)
        return super().load_weights(weights)


class Eagle3LlamaForCausalLM(_Corrections, llama_eagle3.Eagle3LlamaForCausalLM):
    """A P-EAGLE or EAGLE-3 head with Llama's layers."""


class Eagle3Qwen3ForCausalLM(_Corrections, qwen3_eagle3.Eagle3Qwen3ForCausalLM):
    """A P-EAGLE or EAGLE-3 head with Qwen3's layers."""


def _is_idle_map(name: str, weight: torch.Tensor) -> bool:
    if name != "d2t":
        return False
    if weight.any():
        raise ValueError("d2t maps to other tokens, but the draft vocabulary is the target's")
    return True


def _widened(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if weight.dtype is torch.float8_e4m3fn else weight
