"""Statistics of the engine's steps: what they drafted, and how full the engine is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from app.llm.engine_load import EngineLoad
from app.llm.head_acceptance import FirstDrafts


class StepWatch(StatLoggerBase):
    """A vLLM stat logger (vllm/v1/metrics/loggers.py) that counts instead of logging."""

    def __init__(
        self,
        vllm_config: VllmConfig | None = None,
        engine_index: int = 0,
        load: EngineLoad | None = None,
    ) -> None:
        self.draft_tokens = 0
        self.first_drafts = FirstDrafts(0, 0)
        # Outputs of each copy of the engine so far, by its data-parallel rank, empty ones included:
        # they show that it runs.
        self.outputs: Counter[int] = Counter()
        self._load = load or EngineLoad()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called once per engine output (vllm/v1/engine/async_llm.py, output_handler)."""
        self.outputs[engine_idx] += 1
        if scheduler_stats is None:
            return
        self._load.update(
            engine_idx,
            scheduler_stats.num_running_reqs,
            scheduler_stats.num_waiting_reqs,
            scheduler_stats.num_skipped_waiting_reqs,
            scheduler_stats.kv_cache_usage,
        )
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            self.draft_tokens += drafts.num_draft_tokens
            self.first_drafts = FirstDrafts(
                self.first_drafts.verified + drafts.num_drafts,
                self.first_drafts.accepted + drafts.num_accepted_tokens_per_pos[0],
            )

    def log_engine_initialized(self) -> None:
        """Announce nothing; vLLM calls this once the engine is up."""
