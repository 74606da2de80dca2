"""Record vLLM's drafts, step by step: a script that runs one engine after the other (engines.py).

Its job is {"engines": {name: arguments of engines.new_engine}, "prompts": [[id, ...], ...],
"max_tokens": n, "stock": bool}. A stock engine is upstream vLLM without our code; any other has our
scheduler, and another K at every step. An engine may have "swaps", folders of heads that take the
place of the one before, one after the other, "" for the head of its start.

The result has for each engine an entry for each head in order: {"answers": what `stage` and `swap`
said, "steps": steps of prompts that began with this head}. A step is {"text": [id, ...], "draft":
[id, ...], "first": n}: the tokens of one request so far (the newest included), the drafts that
follow them, and where the head's context begins. Steps without drafts are left out.
"""

from __future__ import annotations

import os
from functools import partial
from random import Random
from typing import Any

import torch
from engines import WORKER, generate, greedy, main, new_engine, one_by_one, swap_head
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from bench.simulate.fixed import Fixed
from drafters.control.policy import Load
from drafters.vllm.scheduling.scheduler import DraftingScheduler
from drafters.vllm.v1.runner import V1DraftingRunner

Step = dict[str, Any]

_sample = GPUModelRunner._sample
_propose = {kind: kind.propose_draft_token_ids for kind in (GPUModelRunner, V1DraftingRunner)}


class Restless(Fixed):
    """A K of its own for every step, and stretches without drafts."""

    def __init__(self, k_max: int) -> None:
        super().__init__(k_max, k_max)
        self.random = Random(3)
        self.left = 0

    def choose(self, load: Load) -> int:
        if self.left:
            self.left -= 1
            return 0
        self.left = self.random.choice([0, 0, 0, 0, 2, 9])
        return self.random.randint(1, self.k_max)


class RestlessScheduler(DraftingScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.k_policy = Restless(self.num_spec_tokens)


def watch(kind: type, steps: list[Step]) -> None:
    """Every drafting step from now on is appended to `steps`, once for each request."""
    texts: dict[str, list[int]] = {}
    random = Random(0)

    def sample(self: Any, logits: Any, metadata: Any) -> Any:
        """The drafts of a random head are never right. So that steps with several accepted
        tokens and with none both occur, chance accepts them instead of the target."""
        output = _sample(self, logits, metadata)
        if metadata is not None:
            drafts = metadata.draft_token_ids.split(metadata.num_draft_tokens)
            for row, draft in zip(output.sampled_token_ids, drafts, strict=True):
                accepted = random.randint(0, len(draft))
                row.fill_(-1)
                row[:accepted] = draft[:accepted]
                row[accepted] = random.randrange(logits.shape[-1])
        return output

    def propose(self: Any, scheduled: Any, sampled: torch.Tensor, *args: Any) -> Any:
        drafts = _propose[kind](self, scheduled, sampled, *args)
        first = [0] * len(sampled)
        if kind is V1DraftingRunner:
            contexts = self.own_drafter.contexts
            first = contexts.context_start[contexts.slots(self.input_batch.req_ids)].tolist()
        for row, request in enumerate(self.input_batch.req_ids):
            text = texts.setdefault(request, list(self.requests[request].prompt_token_ids))
            if self.discard_request_mask.np[row]:
                continue
            text += [token for token in sampled[row].tolist() if token >= 0]
            draft = torch.as_tensor(drafts[row]).tolist() if drafts is not None else []
            if draft:
                steps.append({"text": text.copy(), "draft": draft, "first": first[row]})
        return drafts

    GPUModelRunner._sample = sample
    kind.propose_draft_token_ids = propose


def drafted(job: dict[str, Any], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine, and generate with each head in turn."""
    swaps = arguments.pop("swaps", [])
    if not job["stock"]:
        arguments |= {"scheduler_cls": RestlessScheduler, "worker_cls": WORKER}
    engine = new_engine(**arguments, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256)
    steps: list[Step] = []
    watch(GPUModelRunner if job["stock"] else V1DraftingRunner, steps)
    result = []
    for folder in (None, *swaps):
        answers = [] if folder is None else swap_head(engine, folder)
        steps.clear()
        generate(engine, job["prompts"], greedy(job["max_tokens"]))
        result.append({"answers": answers, "steps": list(steps)})
    return result


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Draft with the engines of a job."""
    if job["stock"]:
        os.environ["VLLM_PLUGINS"] = "none"
    return one_by_one(partial(drafted, job), job["engines"])


if __name__ == "__main__":
    main(run)
