"""Tiny random models of the architectures that the presets serve, with facts for tests.

Each is made by transformers' own classes, so that its hidden states come from another
implementation than vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from tests.drafters.vllm.random_heads import RandomTarget, randomise

VOCABULARY = 200
HIDDEN = 64
WINDOW = 16  # tokens that a sliding layer sees: texts are several times as long
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True))


def gpt_oss() -> PreTrainedModel:
    """Sliding and full attention by turns, attention sinks, YaRN, experts with biases."""
    sizes = SIZES | {"intermediate_size": 64}
    return GptOssForCausalLM(
        GptOssConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
            },
        )
    )  # fmt: skip


def gemma4(sliding_heads: int = 2) -> PreTrainedModel:
    """Five sliding layers for each full one, whose heads are wider and fewer; tied embeddings."""
    sizes = SIZES | {"tie_word_embeddings": True, "num_key_value_heads": sliding_heads}
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            **sizes, sliding_window=WINDOW, global_head_dim=64, num_global_key_value_heads=1,
            attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
        )
    )  # fmt: skip


def gemma4_wide() -> PreTrainedModel:
    """As Gemma 4 31B: a token takes twice as much KV cache in a sliding layer as in a full one,
    so that the blocks of the full ones, and of the head, hold twice as many tokens."""
    return gemma4(sliding_heads=4)


@dataclass(frozen=True)
class Replica:
    """One architecture: how to make it, and which KV cache groups its engine must have."""

    make: Callable[[], PreTrainedModel]
    groups: int  # of layers that share block tables; the head's layers are in one of them
    speculators: bool = False  # whether its head comes in the speculators library's layout


REPLICAS = {
    "gpt_oss": Replica(gpt_oss, 3),
    "gemma4_wide": Replica(gemma4_wide, 7),
    "qwen3": Replica(qwen3, 1, speculators=True),
    "llama": Replica(llama, 1),
    "qwen3_moe": Replica(qwen3_moe, 1),
    "gemma4": Replica(gemma4, 7),
}

HEAD = HeadConfig(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    eagle_aux_hidden_state_layer_ids=(2, 3, 5), max_position_embeddings=256, ptd_token_id=3,
    norm_before_residual=True,
)  # fmt: skip


class Target(RandomTarget):
    """A random replica."""

    def __init__(self, name: str, folder: Path) -> None:
        model = REPLICAS[name].make()
        model.set_experts_implementation("eager")  # the grouped one takes minutes on a CPU
        super().__init__(model, folder)


def new_head(texts: list[list[int]], count: int) -> DraftHead:
    """A random P-EAGLE head with embeddings and an output matrix of its own. It drafts `count`
    tokens only, those that the target's texts have most of, and so is right now and then."""
    seen = Counter(token for text in texts for token in text)
    seen.update(dict.fromkeys(range(VOCABULARY), 0))
    vocabulary = sorted(token for token, _ in seen.most_common(count))
    head = DraftHead(replace(HEAD, draft_vocab_size=count), own_embeddings=True, own_lm_head=True)
    randomise(head)
    head.set_draft_vocabulary(torch.tensor(vocabulary))
    return head.eval()
