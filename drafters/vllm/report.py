"""A worker's report on its drafter, read from live objects and called over collective_rpc."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group

from drafters.vllm.own_drafter import looks_up


class DrafterReport:
    """Mixed into this project's worker (worker.py)."""

    model_runner: Any

    def aerie_drafter_report(self) -> dict[str, Any] | None:
        """The drafter in use, or None when this worker has none; empty on a pipeline stage that is
        not the last one, where nothing is drafted.

        Keys: `proposer` and `head` (class names; no head where drafts are looked up), `parallel`
        (all K tokens in one pass), `k` (draft tokens of the head per step, or of the lookup without
        one), `parameters` (count, tensors shared with the target included), `mask_hidden` (the
        learned state of the masked positions is loaded and not all zero; a head without it is no
        P-EAGLE head).
        """
        runner = self.model_runner  # V1 has a drafter, V2 a speculator
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if looks_up(getattr(runner, "speculative_config", None)) and proposer is not None:
            k = int(runner.speculative_config.num_speculative_tokens)
            return {
                "proposer": type(proposer).__name__, "head": None, "parallel": False, "k": k,
                "parameters": 0, "mask_hidden": False,
            }  # fmt: skip
        head = getattr(proposer, "model", None)
        if proposer is None or head is None:
            return None if get_pp_group().is_last_rank else {}
        mask_hidden = getattr(proposer, "parallel_drafting_hidden_state_tensor", None)
        speculation = proposer.vllm_config.speculative_config
        return {
            "proposer": type(proposer).__name__,
            "head": type(head).__name__,
            "parallel": bool(speculation.parallel_drafting),
            "k": int(getattr(proposer, "k_max", speculation.num_speculative_tokens)),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "mask_hidden": mask_hidden is not None and bool(mask_hidden.any()),
        }
