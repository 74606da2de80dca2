"""Read and check a configuration's scaling of rotary embeddings, without torch.

The keys are those of `rope_parameters` (formerly `rope_scaling`) in transformers and vLLM. A key
that would change the angles, and that `drafters.model.rope` does not compute, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RopeType = Literal["linear", "llama3", "yarn"]

# rope_type -> (keys that must be there, keys that may be)
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
_LENGTH = "original_max_position_embeddings"
_IGNORED = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", _LENGTH})


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary embeddings; `rope_type` says which fields count."""

    rope_type: RopeType
    factor: float
    # The length that the target was pretrained on; unused by `linear`.
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def to_json(self) -> dict[str, Any]:
        """The keys of `rope_parameters` but `rope_theta`."""
        required, optional = _KEYS[self.rope_type]
        keys = [*required, *optional, *([] if self.rope_type == "linear" else [_LENGTH])]
        values = {key: getattr(self, key) for key in keys}
        return {"rope_type": self.rope_type} | {k: v for k, v in values.items() if v is not None}


def read_rope(
    document: Mapping[str, Any], *, max_positions: int, default_theta: float
) -> tuple[float, RopeScaling | None]:
    """(`rope_theta`, scaling) of a configuration; the scaling is None for plain rotary embeddings.

    Raises ValueError naming the key that is missing or not supported.
    """
    rope: Mapping[str, Any] = document.get("rope_scaling") or document.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or document.get("rope_theta") or default_theta
    for owner, where in ((document, ""), (rope, "rope_parameters.")):
        if owner.get("partial_rotary_factor") not in (None, 1.0):
            value = owner["partial_rotary_factor"]
            raise ValueError(f"{where}partial_rotary_factor {value!r} is not supported")
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope_parameters for {', '.join(nested)} alone are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *_KEYS):
        raise ValueError(f"rope_type {kind!r} is not supported")
    required, optional = _KEYS.get(kind, ((), ()))
    if missing := [key for key in required if rope.get(key) is None]:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}")
    unknown = sorted(
        key
        for key, value in rope.items()
        if value is not None and key not in {*required, *optional, *_IGNORED}
    )
    if unknown:
        raise ValueError(f"rope_parameters.{unknown[0]} is not supported with rope_type {kind!r}")
    if kind == "default":
        return float(theta), None
    values = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    if kind != "linear":
        # As in transformers: the outer key first, and the whole length without either.
        values[_LENGTH] = int(document.get(_LENGTH) or rope.get(_LENGTH) or max_positions)
    return float(theta), RopeScaling(kind, **values)
