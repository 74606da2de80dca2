"""`aerie bench context`: acceptance by the length of the text, for limits of the head's context.

Each limit has an engine of the embedded model, with the same held-out prompts and long answers.

    aerie bench context --limits 0 416 256 128

Prints one JSON line per limit and workload: the acceptance length of all steps, and of those whose
text had 0-199, 200-399, ... tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence

from bench.errors import reports_errors
from bench.parser import command_parser
from drafters.train.embedded import EMBEDDED

REQUESTS = 16  # requests of each workload, all in one batch
OUTPUT_TOKENS = 1400
BIN = 200
K = 7


def measure(limit: int, temperature: float) -> None:
    """Print the lines of one limit."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    from app.engine.configuration.options import engine_options
    from app.settings import load
    from drafters.train.embedded.tokenizer import load_tokenizer
    from drafters.train.evaluation.workloads import held_out_prompts

    given = {"k": K, "max_num_seqs": REQUESTS, "draft_context": limit}
    given["enable_prefix_caching"] = False
    options = engine_options(load(given, {}, preset="embedded"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    engine = LLM(**{**options, "served_model_name": None}).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    scheduler.speculation("steer", {"objective": "fixed", "k": K})
    prompts = held_out_prompts(load_tokenizer(EMBEDDED / "target"), REQUESTS)
    for workload, texts in prompts.items():
        for number, ids in enumerate(texts):
            params = SamplingParams(
                temperature=temperature, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=number
            )
            engine.add_request(f"{workload}-{number}", {"prompt_token_ids": ids}, params)
        made: dict[str, int] = {}
        steps: dict[int, int] = defaultdict(int)
        tokens: dict[int, int] = defaultdict(int)
        while engine.has_unfinished_requests():
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                before = made.get(output.request_id)
                if before is not None:  # the first token comes from the prefill
                    bin_ = (len(output.prompt_token_ids) + before) // BIN * BIN
                    steps[bin_] += 1
                    tokens[bin_] += count - before
                made[output.request_id] = count
        line = {
            "limit": limit,
            "workload": workload,
            "temperature": temperature,
            "acceptance_length": round(sum(tokens.values()) / sum(steps.values()), 3),
            "by_length": {bin_: round(tokens[bin_] / steps[bin_], 2) for bin_ in sorted(steps)},
        }
        print(json.dumps(line), file=answers, flush=True)


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure each limit in a process of its own; returns the exit code."""
    parser = command_parser("context", __doc__)
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 416, 256, 128],
                        help="limits in tokens, 0 for none [0 416 256 128]")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers [0]")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        measure(options.one, options.temperature)
        return 0
    for limit in options.limits:
        command = [sys.executable, "-m", "bench.parts.context", "--one", str(limit)]
        command += ["--temperature", str(options.temperature)]
        if code := subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"an engine ended with code {code}; its error is above")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
