"""Record vLLM's drafts, step by step: a script that runs one engine after the other.

    python engine_drafts.py JOB RESULT

JOB is a JSON file {"engines": {name: arguments of vllm.LLM}, "prompts": [[id, ...], ...],
"max_tokens": n, "stock": bool}. RESULT gets {name: steps}; a step is {"text": [id, ...],
"draft": [id, ...], "first": n}: the tokens of one request so far (the newest included), the drafts
that follow them, and where the head's context begins. Steps without drafts are left out. A stock
engine is upstream vLLM without our code; any other has our scheduler, and another K at every step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the drafter is watched where it runs

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
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
        self.policy = Restless(self.num_spec_tokens)


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
            first = contexts.first[contexts.slots(self.input_batch.req_ids)].tolist()
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


def engine_steps(job: dict[str, Any], arguments: dict[str, Any]) -> list[Step]:
    """Start an engine, generate, take it down again."""
    if not job["stock"]:
        worker = "drafters.vllm.worker.DraftingWorker"
        arguments = {**arguments, "scheduler_cls": RestlessScheduler, "worker_cls": worker}
    engine = LLM(
        **arguments,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    steps: list[Step] = []
    watch(GPUModelRunner if job["stock"] else V1DraftingRunner, steps)
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    engine.generate(prompts, sampling, use_tqdm=False)  # all in one batch
    del engine
    cleanup_dist_env_and_memory()
    return steps


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["stock"]:
        os.environ["VLLM_PLUGINS"] = "none"
    result = {name: engine_steps(job, arguments) for name, arguments in job["engines"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
