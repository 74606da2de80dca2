"""Tiny random targets of several families, written as checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from drafters.train.target import FrozenTarget

BEGIN, END, TURN_END = 256, 257, 258  # behind the 256 bytes
VOCABULARY = 260
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
CONFIGS = {
    "llama": LlamaConfig(**_COMMON, rope_parameters=_ROPE, rms_norm_eps=1e-5),
    "qwen3": Qwen3Config(**_COMMON, head_dim=8, rope_parameters=_ROPE, tie_word_embeddings=True),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=4, n_positions=128,
        bos_token_id=BEGIN, eos_token_id=END,
    ),
    "opt": OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128, word_embed_proj_dim=16,
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=0,
    ),
    "granite": GraniteConfig(**_COMMON, logits_scaling=8.0),
    "cohere": CohereConfig(**_COMMON, logit_scale=0.25),
    "gemma2": Gemma2Config(
        **_COMMON, head_dim=8, final_logit_softcapping=2.0, sliding_window=16,
    ),
    "phi": PhiConfig(**_COMMON),
    "hyperclovax": HyperCLOVAXConfig(**_COMMON, logits_scaling=8.0),
}  # fmt: skip


def write_target(
    folder: Path,
    kind: str = "llama",
    *,
    seed: int = 1,  # of those tried, the one whose greedy texts vary most
    dtype: torch.dtype = torch.float32,
    chat: bool = True,
) -> Path:
    """A checkpoint with random weights and a tokenizer of bytes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough for texts that differ, and norms that are not the identity.
            parameter.normal_(mean=float("norm" in name or "ln_" in name), std=0.3)
    model.to(dtype).save_pretrained(folder)
    tokenizer(chat=chat).save_pretrained(folder)
    return folder


def load_target(folder: Path, kind: str = "llama", **options: object) -> FrozenTarget:
    return FrozenTarget.load(write_target(folder, kind, **options))  # type: ignore[arg-type]


def tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, `<s>` in front of plain text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*letters, *specials])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(specials)
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE if chat else None,
    )
