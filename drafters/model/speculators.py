"""Write a head in the layout of the speculators library (vllm-project/speculators 0.9).

`drafters.model.checkpoint.load_head` reads it back, and vLLM serves it as it is
(vllm/transformers_utils/configs/speculators). What differs from the flat layout:

- config.json keeps the layers' shape in `transformer_layer_config` and names the target, so
  that `vllm serve FOLDER` starts the target with this head.
- A path selector's key is beside `transformer_layer_config`; its tensors are where they are in the
  flat layout. The library and vLLM's own drafter ignore both.
- `mask_hidden` has a batch dimension, and `lm_head` is always there: the library takes missing
  embeddings from the target, but no missing output matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafters.model.checkpoint import head_weights, save_selector, save_weights
from drafters.model.head import DraftHead

SPECULATORS_VERSION = "0.9.0"  # whose layout this is

# method -> (speculators_model_type, the library's class)
_KINDS = {"eagle3": ("eagle3", "Eagle3DraftModel"), "p-eagle": ("peagle", "PEagleDraftModel")}
_OUTSIDE_OF_LAYERS = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)


def save_speculators(head: DraftHead, folder: Path, *, target: str, draft_tokens: int) -> None:
    """Write the checkpoint in the head's own dtype.

    `target` is the folder or repository name of the target; of a folder its absolute path is
    written. `draft_tokens` is the K that servers start with. A head without an output matrix of its
    own must have the target's (`DraftHead.share`), which is written too; vLLM finds the two equal
    and keeps one. Raises ValueError for `draft_tokens` below 1.
    """
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1, got {draft_tokens}")
    if Path(target).is_dir():
        target = str(Path(target).resolve())
    weights = head_weights(head)
    weights["lm_head.weight"] = head.output_matrix.detach().to(head.fc.weight.dtype).contiguous()
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"][None]  # [1, 1, taps]
    save_weights(weights, folder)
    save_selector(head, folder)
    document = _document(head, target, draft_tokens)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")


def _document(head: DraftHead, target: str, draft_tokens: int) -> dict[str, Any]:
    config = head.config
    kind, architecture = _KINDS[config.method]
    layers = config.to_json(str(head.fc.weight.dtype).removeprefix("torch."))
    del layers["architectures"]
    mask_token = layers.pop("ptd_token_id", None)
    outside = {key: layers.pop(key) for key in _OUTSIDE_OF_LAYERS}
    if config.target_hidden_size == config.hidden_size:
        outside["target_hidden_size"] = None
    if config.path_selector is not None:
        outside["path_selector"] = layers.pop("path_selector")
    if mask_token is not None:
        outside["mask_token_id"] = mask_token
        # vLLM 0.32 reads these two of a peagle head only among the layers' keys, not where the
        # library has them (algos.py, update_peagle).
        layers |= {key: outside[key] for key in ("fc_norm", "norm_output")}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": layers["dtype"],
        **outside,
        "embed_requires_grad": head.own_embeddings,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": _architectures(target)},
        },
    }


def _architectures(target: str) -> list[str]:
    """The target's architectures, if its config.json is on this machine."""
    path = Path(target) / "config.json"
    if not path.is_file():
        return []
    names: list[str] = json.loads(path.read_text()).get("architectures") or []
    return names
