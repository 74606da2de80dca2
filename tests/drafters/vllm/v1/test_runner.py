"""Our V1 model runner: logits processors of requests that are not drafted for, and what the
scheduler is told of a pass."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, build_logitsprocs
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from drafters.control.sources.draft_plan import MATCH_CLASSES, Candidate, DraftPlan, Worth
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from drafters.vllm.v1 import runner
from drafters.vllm.worker import holds_here
from tests.drafters.vllm.verification.test_greedy import sampling

CPU = torch.device("cpu")


def configured() -> Any:
    return SimpleNamespace(
        speculative_config=object(), scheduler_config=SimpleNamespace(max_num_seqs=4)
    )


def test_logit_bias_and_min_p_keep_their_processors_beside_our_drafter() -> None:
    """The fault: vLLM drops them under speculation, and the requests' options with them."""
    config = configured()
    stock = {type(one) for one in build_logitsprocs(config, CPU, False, False).all}
    assert stock == {MinTokensLogitsProcessor}
    ours = {type(one) for one in runner.undrafted_processors(config, CPU).all}
    assert ours == {LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor}
    assert config.speculative_config is not None  # the engine's own is not touched


def test_vllms_warning_about_them_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a log that says that they have no effect."""
    logger = logging.getLogger("vllm.v1.sample.logits_processor")
    logger.addHandler(caplog.handler)  # vLLM's own configuration ends propagation above it
    try:
        build_logitsprocs(configured(), CPU, False, False)
        assert "won't work" in caplog.text
        caplog.clear()
        logger.addFilter(holds_here)
        build_logitsprocs(configured(), CPU, False, False)
        logger.warning("another")
        assert set(caplog.messages) == {"another"}
    finally:
        logger.removeFilter(holds_here)
        logger.removeHandler(caplog.handler)


def test_installed_logits_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: without the speculative configuration vLLM loads them, and they are skipped where
    drafts are verified."""
    installed = [SimpleNamespace(value="their:Processor")]
    monkeypatch.setattr(runner, "entry_points", lambda group: installed)
    with pytest.raises(ValueError, match=r"their:Processor .* not applied to drafted"):
        runner.undrafted_processors(configured(), CPU)


def test_the_scheduler_is_told_what_the_head_read_of_earlier_steps() -> None:
    made: Any = object.__new__(runner.V1DraftingRunner)
    drafter = SimpleNamespace(draft=lambda *_: [[5]], synchronized=0.0, missed_tokens_read=7)
    made.own_drafter, made.lookup, made._sources = drafter, None, WorkerStepOutput()
    scheduled = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=1)
    nothing = (None,) * 8
    assert made.propose_draft_token_ids(scheduled, *nothing) == [[5]]
    assert made._sources.missed_tokens_read == 7


@pytest.mark.parametrize(("prompt", "k"), [(40, 3), (1, 0)])
def test_a_pass_that_only_reads_prompts_counts_with_its_k(prompt: int, k: int) -> None:
    """All drafts are looked up, and one request reads `prompt` tokens. The fault: the step counted
    as one at K = 0, from which the scheduler learns what steps take without the head."""
    made: Any = object.__new__(runner.V1DraftingRunner)
    passes: list[Any] = []
    made.own_drafter = SimpleNamespace(
        contexts=SimpleNamespace(slots=lambda names: None), unread=lambda slots: None,
        draft=lambda *given, **which: passes.append((given[0], which["reading"].tolist())),
    )  # fmt: skip
    made.lookup = SimpleNamespace(
        candidates=lambda *_: [Candidate(10, match=16), Candidate(0)], matches=(),
        draft=lambda name, count: [7] * count,
    )  # fmt: skip
    made.input_batch = SimpleNamespace(req_ids=["copies", "reads"])
    plan = DraftPlan((Worth(4, 3.0),) * len(MATCH_CLASSES), head_k=3, head_gain=0.5)
    common = SimpleNamespace(query_start_loc_cpu=torch.tensor([0, 3, 3 + prompt]))
    step = ({"copies": [5, 6]}, torch.zeros(2, 1), None, common, None)
    assert made._draft_by_plan(plan, 3, step) == [[7] * 4, []]
    assert passes == [(k, [False, prompt > 1])]
    assert (made._sources.head_k, made._sources.looked_up) == (k, ("copies",))


def test_a_thinking_budget_ends_its_own_request_in_a_step_without_drafts() -> None:
    """The second request has thought for as long as it may. The fault: under speculation vLLM took
    the rows for those of drafts, of which there are none, and ended the first one's thinking."""
    start, end, answer = 20, 21, 7
    outputs = [[1, 2], [start, 3, 4]]
    tokens: Any = SimpleNamespace(reasoning_start_token_ids=[start], reasoning_end_token_ids=[end])
    budgets = ThinkingBudgetStateHolder(tokens, 4, 5, CPU, False)
    added = [
        (row, SamplingParams(thinking_token_budget=budget), [5], outputs[row])
        for row, budget in enumerate((None, 2))
    ]
    budgets.sync_batch(BatchUpdate(batch_size=2, removed=[], added=added, moved=[]))
    made: Any = object.__new__(runner.V1DraftingRunner)
    made.sampler = Sampler()
    made.input_batch = SimpleNamespace(
        sampling_metadata=sampling(
            output_token_ids=outputs, spec_token_ids=[[], []], thinking_budget_state_holder=budgets
        )
    )
    logits = torch.zeros(2, 24)
    logits[:, answer] = 1
    sampled = made._sample(logits, runner.NoDrafts(torch.arange(2))).sampled_token_ids
    assert sampled.tolist() == [[answer], [end]]
