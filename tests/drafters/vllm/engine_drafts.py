"""What vLLM drafts, step by step: run as a script, one engine after the other.

    python engine_drafts.py JOB RESULT

JOB is a JSON file {"engines": {name: arguments of vllm.LLM}, "prompts": [[id, ...], ...],
"max_tokens": n}. RESULT gets {name: steps}; a step is {"text": [id, ...], "draft": [id, ...]},
the tokens of one request so far (the newest included) and the drafts that shall follow them.
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

Step = dict[str, list[int]]

_sample = GPUModelRunner._sample
_propose = GPUModelRunner.propose_draft_token_ids


def watch(steps: list[Step]) -> None:
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
        drafts = _propose(self, scheduled, sampled, *args)
        for row, request in enumerate(self.input_batch.req_ids):
            text = texts.setdefault(request, list(self.requests[request].prompt_token_ids))
            text += [token for token in sampled[row].tolist() if token >= 0]
            steps.append({"text": text.copy(), "draft": drafts[row].tolist()})
        return drafts

    GPUModelRunner._sample = sample
    GPUModelRunner.propose_draft_token_ids = propose


def engine_steps(job: dict[str, Any], arguments: dict[str, Any]) -> list[Step]:
    """Start an engine, generate, take it down again."""
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
    watch(steps)
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
    result = {name: engine_steps(job, arguments) for name, arguments in job["engines"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
