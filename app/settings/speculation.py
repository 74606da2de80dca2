"""Settings of speculative decoding: the draft head, K, and what K is chosen for."""

from __future__ import annotations

from pydantic import Field

from app.settings.section import Section
from drafters.config import TPOT_BOUNDS_S, DrafterConfig
from drafters.control.objective import FIXED, Name, Objective


class SpeculationSettings(Section):
    """Settings of speculative decoding."""

    drafter: str | None = Field(
        None, min_length=1, description="P-EAGLE or EAGLE-3 head: a folder or a hub id."
    )
    k: int = Field(
        5,
        ge=0,
        le=32,
        description="Most draft tokens of the head per request and step (K); 0 drafts nothing.",
    )
    lookup_k: int = Field(
        10,
        ge=0,
        le=32,
        description="Most draft tokens per request and step of a lookup, which continues a "
        "repetition in the request's own text; 0 looks nothing up. Not beside a head on the V2 "
        "model runner. Without a head, a model with recurrent layers (Mamba, gated delta nets) has "
        "lookups only if this is given: they multiply the memory of a request.",
    )
    objective: Name = Field(
        "throughput",
        description="What K is chosen for at every step: most tokens per second, most tokens per "
        "second while `tpot_s` holds, always `k`, or no drafts at all.",
    )
    tpot_s: float | None = Field(
        None,
        ge=TPOT_BOUNDS_S[0],
        le=TPOT_BOUNDS_S[1],
        description="Seconds per output token that `--objective latency` holds.",
    )
    calibration_s: float = Field(
        10.0,
        ge=0,
        le=60,
        description="Seconds that start-up may spend on measuring what steps cost; 0 learns from "
        "the first requests instead.",
    )
    calibration_file: str | None = Field(
        None, description="File that the measured costs are kept in for the next start."
    )
    speculation_header: bool = Field(
        True,
        description="Report in every answer how many tokens were drafted and accepted: in the "
        "header `x-aerie-speculation` and, as vLLM does, in `metrics.speculative_decoding`; and to "
        "requests that ask for it (`speculation.tokens`), which tokens.",
    )
    catch_up_tokens: int = Field(
        DrafterConfig.catch_up_tokens,
        ge=1,
        description="How many tokens a request can go without drafting before the drafter "
        "forgets what came earlier. Each one costs a hidden state of memory for every request "
        "of a full batch.",
    )
    draft_context: int = Field(
        DrafterConfig.context_tokens,
        ge=0,
        description="How many tokens the drafter looks back at most; 0 for all. A head drafts "
        "worse in contexts that are longer than those it was trained on.",
    )

    strict_speculation: bool = Field(
        False,
        description="Exit if the engine does not start with the model runner that it should have, "
        "instead of starting on another one or without drafts.",
    )

    @property
    def head_k(self) -> int:
        """The largest K of the draft head; 0 without one."""
        return self.k if self.drafter is not None else 0

    @property
    def asks_for_lookups(self) -> bool:
        """Whether `lookup_k` was given. A model with recurrent layers has lookups only then."""
        return "lookup_k" in self.model_fields_set

    def aim(self) -> Objective:
        """The objective that K is chosen for. Raises ObjectiveError."""
        return Objective(self.objective, self.k if self.objective == FIXED else None, self.tpot_s)
