"""Convert a GGUF file of a Llama model to a Hugging Face checkpoint in bfloat16.

transformers dequantises the weights and rebuilds the tokenizer. Two of its faults are corrected
here: the epsilon of the norms is rounded to float32, and the tokenizer lacks the pre-tokenizer
that the file names. The same file gives the same bytes each time.

`drafters.packaged` runs it: python -m drafters.gguf_conversion SOURCE FOLDER. A failure is one JSON
object on standard output, with `errno` if the disk is the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("accelerate", "gguf", "safetensors", "tokenizers", "torch", "transformers")

# GGUF's tokenizer.ggml.pre -> the pre-tokenizer that splits text before the BPE merges (llama.cpp:
# llama-vocab.cpp). transformers uses ByteLevel alone for all, which makes 12 one token of SmolLM2.
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    }
}


def convert(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer, chat template and weights into `folder`.

    Raises OSError where the disk fails, ValueError for a pre-tokenizer not in PRE_TOKENIZERS.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pre_tokenizer, template = _tokenizer_fields(source)
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(**place)

    config = _config(model)
    _write_json(folder / "config.json", config)
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")  # sampling is left to the request
    _write_json(folder / "generation_config.json", {name: config[name] for name in tokens})
    _write_tokenizer(folder, tokenizer, pre_tokenizer, config["max_position_embeddings"])
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    _write_weights(folder / "model.safetensors", model)


def _tokenizer_fields(source: Path) -> tuple[dict[str, Any], str | None]:
    """(pre-tokenizer, chat template) that the file names."""
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    name = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "none"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"its pre-tokenizer is {name}, and only {known} is supported")
    template = fields.get("tokenizer.chat_template")
    return PRE_TOKENIZERS[name], None if template is None else template.contents()


def _config(model: Any) -> dict[str, Any]:
    """config.json of the checkpoint, without the GGUF file's `quantization_config` and paths."""
    config: dict[str, Any] = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config["dtype"] = "bfloat16"
    config["architectures"] = [type(model).__name__]
    # GGUF stores a float32: 1e-05 reads as 9.999999747378752e-06.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    return config


def _write_tokenizer(
    folder: Path, tokenizer: Any, pre_tokenizer: dict[str, Any], max_length: int
) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"] = pre_tokenizer
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    special = ("bos_token", "eos_token", "pad_token", "unk_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{name: getattr(tokenizer, name) for name in special},
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_weights(file: Path, model: Any) -> None:
    """Write all tensors in bfloat16, without an output matrix that is tied to the embedding."""
    import torch
    from safetensors.torch import save

    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    # save_file writes in Rust: its errors have no errno, and its files only their owner can read.
    file.write_bytes(save(state, metadata={"format": "pt"}))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")


def main(argv: Sequence[str]) -> int:
    """Convert SOURCE into FOLDER; returns the exit code."""
    source, folder = argv
    code: int | None = None
    try:
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ValueError(f"packages are missing ({', '.join(missing)})")
        convert(Path(source), Path(folder))
    except OSError as error:
        code, message = error.errno, str(error)
    except Exception as error:  # transformers may raise anything for a damaged file
        message = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['?'])[0]}"
    else:
        return 0
    print(json.dumps({"errno": code, "message": message}))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
