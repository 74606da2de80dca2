"""The drafting settings that the gateway passes to the engine's processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KEY = "aerie"  # our entry in vLLM's `additional_config`
MAX_DEFERRED_STEPS = 16  # steps at K = 0 whose hidden states the drafter stores or enters together
# Bounds of a TPOT objective, in seconds: no machine makes a million tokens of one text in a second,
# and nobody waits an hour for one.
TPOT_BOUNDS_S = (1e-6, 3600.0)
# Where draft tokens come from: the draft head, a repetition in the request's own text, and what the
# request's grammar leaves no choice about. The order is that of counts by source.
SOURCES = HEAD, LOOKUP, GRAMMAR = "head", "lookup", "grammar"
# What drafts by lookup without a head on vLLM's V1 model runner: a class that vLLM imports.
LOOKUP_DRAFTER = "drafters.vllm.v1.lookup.LookupProposer"
# Tokens of a match, on V2: vLLM's kernels compare each of these lengths.
SHORTEST_MATCH, LONGEST_MATCH = 2, 8
# Keys in SamplingParams.extra_args of a request: its largest K, and whether it asked where its
# tokens come from.
MAX_K = "aerie_max_k"
REPORT_TOKENS = "aerie_report_tokens"
# The gateway's own: that it captures the request, and wants its steps.
REPORT_STEPS = "aerie_report_steps"


def captured_ks(k_max: int) -> tuple[int, ...]:
    """The K, 0 to `k_max` in rising order, for which CUDA graphs are captured and among which K is
    chosen where they are. Each takes start-up time and memory, and neighbours cost nearly the same.
    """
    return tuple(sorted({k for k in (0, 1, 2, 3, 5, 7) if k < k_max} | {k_max}))


def captured_table(k_max: int) -> list[tuple[int, int, int]]:
    """A table from batch size to K (`num_speculative_tokens_per_batch_size`) that names each of
    `captured_ks`: vLLM captures CUDA graphs for those (v1/worker/gpu/cudagraph_utils.py,
    _init_candidates). The scheduler reads no table."""
    return [(size, size, k) for size, k in enumerate(captured_ks(k_max), start=1)]


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter's settings, in `additional_config["aerie"]` of vLLM's configuration.

    `catch_up_tokens` is how many tokens a request can go without drafting before the drafter
    forgets what came earlier (docs/decisions/0006). `context_tokens` is how many tokens the draft
    head looks back at most, 0 for all (docs/decisions/0012). `head_tokens` is the largest K of the
    head, and `lookup_tokens` the most draft tokens of a lookup, 0 for none. The larger of the two
    is vLLM's own `speculative_config.num_speculative_tokens`, the most of any source.
    """

    head_tokens: int | None = None  # None: all of `num_speculative_tokens`
    lookup_tokens: int = 0
    catch_up_tokens: int = 256
    context_tokens: int = 0
    bfloat16_on_cpu: bool = True  # a float32 head multiplies in bfloat16 where that is faster

    def __post_init__(self) -> None:
        if self.catch_up_tokens < 1:
            raise ValueError(f"catch_up_tokens is {self.catch_up_tokens}, it must be positive")
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens is {self.context_tokens}, it must not be negative")
        if self.lookup_tokens < 0 or (self.head_tokens or 0) < 0:
            raise ValueError("head_tokens and lookup_tokens must not be negative")

    def head_k(self, num_speculative_tokens: int) -> int:
        """The largest K of the head, in an engine with at most `num_speculative_tokens` drafts."""
        if self.head_tokens is None:
            return num_speculative_tokens
        return min(self.head_tokens, num_speculative_tokens)

    def lookup_k(self, num_speculative_tokens: int) -> int:
        """The most draft tokens of a lookup, in an engine with `num_speculative_tokens` at most."""
        return min(self.lookup_tokens, num_speculative_tokens)

    def window(self, max_num_tokens: int) -> int:
        """How many tokens' hidden states are stored for a request: at most half of a pass of
        `max_num_tokens`, so that a request that is behind always fits in the next one."""
        return min(self.catch_up_tokens, max_num_tokens // 2)

    def entry(self) -> dict[str, Any]:
        """The entry for vLLM's `additional_config`."""
        return {KEY: asdict(self)}

    @classmethod
    def read(cls, additional: Mapping[str, Any] | None) -> DrafterConfig:
        """Read it from `additional_config`. Raises ValueError for unknown keys."""
        values = dict((additional or {}).get(KEY, {}))
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"unknown keys in additional_config.{KEY}: {', '.join(sorted(unknown))}"
            )
        return cls(**values)
