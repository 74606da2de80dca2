"""Settings of the vLLM engine's sizes."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from app.settings.section import Section

_OWN_CLASS = "the gateway uses a class of its own for it"
# vLLM's engine arguments that would be without effect here, or would take the place of what the
# gateway depends on -> why.
REFUSED: dict[str, str] = {
    "scheduler_cls": _OWN_CLASS,
    "worker_cls": _OWN_CLASS,
    "worker_extension_cls": "nothing here calls methods of workers",
    "additional_config": "the gateway puts the drafter's configuration there",
    "disable_log_stats": "metrics and the choice of K need them",
    "enable_lora": "adapters are not served",
    "enable_sleep_mode": "nothing here puts the engine to sleep or wakes it",
    "weight_transfer_config": "nothing here replaces weights; start the gateway anew for others",
    "enable_prompt_embeds": "prompts are text or token ids",
    "enable_elastic_ep": "nothing here changes the number of GPUs of a running engine",
}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_LONGEST_THAT_FITS = ("auto", "-1", -1)  # vLLM's forms


class EngineSettings(Section):
    """Sizes of the vLLM engine. None leaves the choice to vLLM."""

    max_model_len: int | None = Field(
        None, ge=16, description="Longest prompt plus output, in tokens."
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Most requests in one batch.")
    max_num_batched_tokens: int | None = Field(None, ge=16, description="Most tokens in one step.")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="KV cache in GiB (default: on a GPU vLLM's share of its memory, on a CPU a "
        "quarter of what is free).",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of GPU memory that vLLM may use, and that must be free when it starts "
        "(default: vLLM's 0.92, or 0.01 where the size of the KV cache is given).",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that the model is split over.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prefixes.")
    enforce_eager: bool = Field(False, description="Skip compilation: starts faster, runs slower.")
    seed: int = Field(0, description="Seed of the engine.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further vLLM engine arguments, as a JSON object; vLLM's names.",
    )

    @property
    def has_weights(self) -> bool:
        """False if vLLM makes the weights up: then there is nothing in them to check."""
        return self.engine_args.get("load_format") != "dummy"

    @model_validator(mode="before")
    @classmethod
    def _fitted_length(cls, values: Any) -> Any:
        """Hand vLLM's `--max-model-len auto`, the longest that fits the memory, on to vLLM."""
        if not isinstance(values, dict) or values.get("max_model_len") not in _LONGEST_THAT_FITS:
            return values
        rest = {name: value for name, value in values.items() if name != "max_model_len"}
        try:
            arguments = cls._from_json(values.get("engine_args") or {})
        except ValueError:
            return rest  # the check of engine_args names it
        if not isinstance(arguments, dict):
            return rest
        return {**rest, "engine_args": {**arguments, "max_model_len": -1}}

    @field_validator("max_model_len", "max_num_batched_tokens", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        """Read numbers as vLLM does: 32k is 32,000 and 32K is 32,768."""
        match = _COUNT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        base = 1000 if match[2].islower() else 1024
        return int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1))

    @field_validator("engine_args", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Read text, from the command line or the environment, as JSON."""
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("engine_args")
    @classmethod
    def _refuse(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse arguments that cannot work here, unless they are switched off."""
        for name, reason in REFUSED.items():
            if value.get(name):
                raise ValueError(f"{name} cannot work here: {reason}")
        return value
