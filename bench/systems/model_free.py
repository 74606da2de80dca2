"""Real architectures without weights, with drafts accepted at published rates.

Speed depends on shapes and on how many drafts are accepted, not on the text. So vLLM makes up the
weights (`load_format: dummy`) and accepts drafts at random (`rejection_sample_method: synthetic`),
at each position with the rate that was published for the head. This measures the engine: kernels,
scheduler, drafter, gateway. The text means nothing, and acceptance does not depend on the load.

On a CPU only this gateway can do that (drafters/vllm/verification/synthetic.py): vLLM's own CPU
kernels have no synthetic acceptance.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.settings import REPOSITORY
from bench.simulate.curve import from_length, from_lengths
from bench.systems.target_configs import QWEN3_8B, QWEN3_CODER_30B, TOY, TOY_MOE, gpt_oss, rope

_TOKENIZER = REPOSITORY / "models" / "embedded" / "target"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEAD_LAYERS = {"p-eagle": 4, "eagle3": 1}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A target's config.json, and the published acceptance of its heads.

    `rates`: share of all drafts that are accepted up to and including each position, for P-EAGLE.
    `eagle3`: K -> acceptance length, bonus token included.
    """

    config: dict[str, Any]
    rates: tuple[float, ...]
    eagle3: dict[int, float]
    source: str


# RedHatAI/Qwen3-8B-speculator.peagle on HumanEval, by position.
_PUBLISHED = (0.813, 0.590, 0.411, 0.279, 0.188, 0.128, 0.089)
# vLLM project's post on P-EAGLE, GPT-OSS-20B on HumanEval: lengths of EAGLE-3 by K, and of P-EAGLE.
_LENGTHS = {3: 2.65, 7: 3.03}
_GPT_OSS_20B = tuple(from_lengths(3, 3.02, 7, 3.94))
_GPT_OSS_120B = tuple(from_length(5, 3.15))  # card of amazon/gpt-oss-120b-p-eagle, HumanEval
_SOURCE = "rates of RedHatAI/Qwen3-8B-speculator.peagle on HumanEval"

ARCHITECTURES = {
    "toy": Architecture(TOY, _PUBLISHED, _LENGTHS, f"no model's shape; {_SOURCE}"),
    "toy-moe": Architecture(TOY_MOE, _PUBLISHED, _LENGTHS, f"no model's shape; {_SOURCE}"),
    "qwen3-8b": Architecture(QWEN3_8B, _PUBLISHED, _LENGTHS, f"Qwen/Qwen3-8B; {_SOURCE}"),
    "qwen3-coder-30b": Architecture(
        QWEN3_CODER_30B, _PUBLISHED, _LENGTHS, f"Qwen/Qwen3-Coder-30B-A3B-Instruct; {_SOURCE}"
    ),
    "gpt-oss-20b": Architecture(
        gpt_oss(24, 32), _GPT_OSS_20B, _LENGTHS, "openai/gpt-oss-20b; lengths on HumanEval"
    ),
    "gpt-oss-120b": Architecture(
        gpt_oss(36, 128), _GPT_OSS_120B, {}, "openai/gpt-oss-120b; length on HumanEval at K = 5"
    ),
}


FEWEST_LAYERS = 6  # for three taps that differ


def named(name: str) -> Architecture:
    """The architecture of that name, or of `NAME@LAYERS` the one with so many layers of the target.
    Raises ValueError for an unknown one, or too few layers."""
    base, _, count = name.partition("@")
    if base not in ARCHITECTURES:
        raise ValueError(f"no architecture {base!r}: {', '.join(ARCHITECTURES)}")
    found = ARCHITECTURES[base]
    if "@" not in name:
        return found
    if not count.isdecimal() or int(count) < FEWEST_LAYERS:
        raise ValueError(f"{name!r}: give a number of layers from {FEWEST_LAYERS}")
    config = found.config | {"num_hidden_layers": int(count)}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: int(count)]
    return replace(found, config=config)


def rates(architecture: Architecture, k: int) -> list[float]:
    """Acceptance rates of K positions. After the last published one, they fall by the same factor
    as the last one did."""
    found = list(architecture.rates[:k])
    while len(found) < k:
        found.append(round(found[-1] ** 2 / found[-2], 6))
    return found


def speculation(architecture: Architecture, k: int, method: str) -> dict[str, Any]:
    """Keys of vLLM's `speculative_config` beside method, model and K. Raises ValueError for EAGLE-3
    at a K for which no acceptance length was published."""
    if method == "eagle3":
        if k not in architecture.eagle3:
            known = ", ".join(map(str, architecture.eagle3))
            raise ValueError(f"no length of EAGLE-3 at K={k} was published, only at {known}")
        accepted: dict[str, Any] = {"synthetic_acceptance_length": architecture.eagle3[k]}
    else:
        accepted = {"synthetic_acceptance_rates": rates(architecture, k)}
    return {"rejection_sample_method": "synthetic", **accepted}


def write(name: str, folder: Path) -> dict[str, Path]:
    """Write folders `target`, `p-eagle` and `eagle3` below `folder`, with configurations and a
    tokenizer but no weights; returns their paths. `name` is that of `named`, which may raise."""
    config = named(name).config
    places = {part: folder / part for part in ("target", *HEAD_LAYERS)}
    for part, place in places.items():
        place.mkdir(parents=True, exist_ok=True)
        document = config if part == "target" else head_config(config, part)
        (place / "config.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    for file in _TOKENIZER_FILES:
        shutil.copyfile(_TOKENIZER / file, places["target"] / file)
    _name_every_token(places["target"] / "tokenizer.json", config["vocab_size"])
    return places


def _name_every_token(file: Path, count: int) -> None:
    """Add a name for every unused token id, else an answer would have events without text. No merge
    leads to these tokens."""
    document = json.loads(file.read_text("utf-8"))
    vocabulary = document["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in document["added_tokens"])}
    vocabulary |= {f"~{index}": index for index in range(count) if index not in known}
    file.write_text(json.dumps(document), "utf-8")


def head_config(target: dict[str, Any], method: str, taps: int = 3) -> dict[str, Any]:
    """The config of a head: as wide as the target, with `taps` from early to late layers."""
    layers = target["num_hidden_layers"]
    between = (layers - 4) / (taps - 1)
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "dtype")  # fmt: skip
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        **{name: target[name] for name in kept},
        # A head is dense, also for a target with experts.
        "intermediate_size": max(target["intermediate_size"], 3 * target["hidden_size"]),
        "target_hidden_size": target["hidden_size"], "draft_vocab_size": target["vocab_size"],
        "num_hidden_layers": HEAD_LAYERS[method], "hidden_act": "silu", "mlp_bias": False,
        "attention_bias": False, "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2 + round(between * tap) for tap in range(taps)],
        "rope_parameters": rope(target.get("rope_parameters", {}).get("rope_theta", 1e6)),
    }  # fmt: skip
    return head | ({"ptd_token_id": target["vocab_size"] - 1} if method == "p-eagle" else {})
