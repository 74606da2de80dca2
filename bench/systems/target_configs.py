"""config.json of targets, for engines without weights and configurations without a GPU."""

from __future__ import annotations

from typing import Any


def config(**more: Any) -> dict[str, Any]:
    """What most of the targets share, and `more`."""
    return {
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "eos_token_id": 0, "bos_token_id": None, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "dtype": "bfloat16", **more,
    }  # fmt: skip


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """The `rope_parameters` of transformers for a base."""
    return {"rope_type": "default", "rope_theta": theta, **more}


QWEN3_8B = config(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, num_hidden_layers=36,
    intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=151936, rope_parameters=rope(1000000.0),
)  # fmt: skip
QWEN3_CODER_30B = config(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048,
    num_hidden_layers=48, intermediate_size=5472, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    rope_parameters=rope(10000000.0), max_position_embeddings=262144,
)  # fmt: skip
TOY = config(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=128, num_hidden_layers=6,
    intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=8192, rope_parameters=rope(1000000.0), max_position_embeddings=2048,
    dtype="float32",
)  # fmt: skip
TOY_MOE = TOY | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """GPT-OSS: alternating sliding and full attention; experts in MXFP4, all else in bfloat16."""
    kept = ("self_attn", "mlp.router")
    whole = [*(f"model.layers.*.{part}" for part in kept), "model.embed_tokens", "lm_head"]
    return config(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", hidden_size=2880,
        num_hidden_layers=layers, intermediate_size=2880, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=experts, num_experts_per_tok=4,
        vocab_size=201088, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        attention_bias=True, swiglu_limit=7.0, rms_norm_eps=1e-5, max_position_embeddings=131072,
        rope_parameters=rope(
            150000.0, rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=4096,
        ),
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": whole},
    )  # fmt: skip


def _llama(**more: Any) -> dict[str, Any]:
    return config(
        architectures=["LlamaForCausalLM"], model_type="llama", mlp_bias=False,
        rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128, vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=rope(
            500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ) | more  # fmt: skip


LLAMA_8B = _llama(
    hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32
)
LLAMA_70B = _llama(
    hidden_size=8192, num_hidden_layers=80, intermediate_size=28672, num_attention_heads=64
)
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600,
    "num_attention_heads": 64,
}  # fmt: skip
SMOLLM2_135M = _llama(
    hidden_size=576, num_hidden_layers=30, intermediate_size=1536, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192,
    tie_word_embeddings=True, rope_parameters=rope(100000.0),
)  # fmt: skip
# The text part alone. Its number of query heads and the width of its MLP are not in the preset's
# facts, and taken from the model before (Gemma 3 27B): no figure of a configuration has them.
GEMMA4_31B = config(
    architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", hidden_size=5376,
    num_hidden_layers=60, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
    head_dim=256, global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True,
    hidden_size_per_layer_input=0, vocab_size=262144, sliding_window=1024, rms_norm_eps=1e-6,
    max_position_embeddings=262144, tie_word_embeddings=True,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10,
)  # fmt: skip

# By the name that a preset gives the target.
BY_MODEL = {
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": QWEN3_CODER_30B,
    "google/gemma-4-31B-it": GEMMA4_31B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
    "openai/gpt-oss-20b": gpt_oss(24, 32),
    "openai/gpt-oss-120b": gpt_oss(36, 128),
    "packaged:smollm2-135m": SMOLLM2_135M,
}
