"""A small random target and random heads, whose drafts depend on every weight.

Nothing has to travel for them, and the torch module computes what they should draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import HeadConfig, Method
from drafters.model.head import DraftHead
from drafters.train.optimisation.draft_passes import draft_outputs, real_entries

LAYERS = {"p-eagle": 2, "eagle3": 1}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The size of the target, and of the heads, which are as wide."""

    hidden: int
    heads: int
    layers: int = 4
    head_dim: int = 64
    kv_heads: int = 2
    vocabulary: int = 256
    longest: int = 512


def write(shape: ModelShape, method: Method, dtype: torch.dtype, folder: Path) -> dict[str, Path]:
    """Write a target and a head of `method` below `folder`; returns the folders by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    places = {"target": folder / "target", "head": folder / method}
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.longest,
        tie_word_embeddings=False, initializer_range=shape.hidden**-0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(places["target"])
    head = DraftHead(
        HeadConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.hidden, target_hidden_size=shape.hidden,
            intermediate_size=2 * shape.hidden, num_hidden_layers=LAYERS[method],
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, eagle_aux_hidden_state_layer_ids=(1, 2, 3),
            max_position_embeddings=shape.longest,
            ptd_token_id=3 if method == "p-eagle" else None,
        )
    )  # fmt: skip
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            # Embeddings and mask_hidden are not multiplied: their entries are as large as states.
            scale = 1.0 if "embed" in name or name == "mask_hidden" else parameter.shape[-1] ** -0.5
            # Sharp attention, else masked positions draft much the same after every text.
            torch.nn.init.normal_(parameter, std=2 * scale if "self_attn" in name else scale)
    save_head(head.to(dtype), places["head"])
    return places


class Reference:
    """What the head should draft after a text, by plain torch."""

    def __init__(self, places: dict[str, Path], dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self._target = AutoModelForCausalLM.from_pretrained(places["target"], dtype=dtype)
        self._target = self._target.eval().to(device)
        self._head = load_head(places["head"], dtype=dtype).to(device)
        lent = {
            "embeddings": self._target.get_input_embeddings().weight,
            "lm_head": self._target.get_output_embeddings().weight,
        }
        self._head.share(**lent)
        self._device = device

    @torch.no_grad()
    def logits(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """Logits of each draft after `text`, if those before it are the ones of `drafted`:
        `[drafts, vocabulary]`, in this reference's dtype."""
        head = self._head
        ids = torch.tensor([text], device=self._device)
        states = self._target(ids[:, :-1], output_hidden_states=True).hidden_states
        taps = torch.cat(
            [states[tap] for tap in head.config.eagle_aux_hidden_state_layer_ids], dim=-1
        )
        entries = real_entries(head, ids, taps)
        last = torch.tensor([len(text) - 2], device=self._device)  # it holds the text's last token
        # EAGLE-3 goes on with the engine's draft, so that each is compared after the same ones.
        whole = torch.tensor([[*text, *drafted]], device=self._device)
        later = draft_outputs(head, entries, [last] * (len(drafted) - 1), whole)
        return head.logits(torch.cat([entries.output[:, last], *later])[:, 0])
