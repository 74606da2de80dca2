"""`aerie bench context`: acceptance by the length of the text, for limits of the head's context.

Each limit has an engine of its own, which drafts with a fixed K and the head alone, for the same
prompts and long answers. Prompts of the embedded model are held-out ones; for another preset,
--workload names them.

    aerie bench context --limits 0 416 256 128
    aerie bench context --preset smollm2-135m --workload chat --limits 512 --tokens 2000

Prints one JSON line per limit and workload: the acceptance length of all steps, of those whose text
had 0-199, 200-399, ... tokens (`by_length`), and of those at place 0-199, ... of the answer
(`by_place`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench.errors import reports_errors
from bench.parser import command_parser
from bench.parts.offline import engine_core, start
from bench.workloads.load import load_prompts
from drafters.train.embedded import EMBEDDED
from drafters.train.number_options import positive_int

EMBEDDED_PRESET = "embedded"
EMBEDDED_K = 7  # other presets name theirs
BIN = 200


def measure(options: argparse.Namespace, limit: int) -> None:
    """Print the lines of one limit."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import SamplingParams

    from app.settings import load

    given: dict[str, Any] = {"max_num_seqs": options.requests, "draft_context": limit}
    given["enable_prefix_caching"] = False
    if options.preset == EMBEDDED_PRESET:
        given["k"] = EMBEDDED_K
    settings = load(given, {}, preset=options.preset)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    llm = start(settings)
    engine = llm.llm_engine
    engine_core(llm).scheduler.speculation(
        "steer", {"objective": "fixed", "k": settings.speculation.k}
    )
    for workload, prompts in _prompts(options, llm.get_tokenizer()).items():
        for number, ids in enumerate(prompts):
            params = SamplingParams(
                temperature=options.temperature,
                max_tokens=options.tokens,
                ignore_eos=True,
                seed=number,
            )
            engine.add_request(f"{workload}-{number}", {"prompt_token_ids": ids}, params)
        made: dict[str, int] = {}
        by_length, by_place = _Bins(), _Bins()
        while engine.has_unfinished_requests():
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                before = made.get(output.request_id)
                if before is not None:  # the first token comes from the prefill
                    by_length.add(len(output.prompt_token_ids) + before, count - before)
                    by_place.add(before, count - before)
                made[output.request_id] = count
        line = {
            "preset": options.preset,
            "limit": limit,
            "workload": workload,
            "temperature": options.temperature,
            "acceptance_length": round(by_place.mean(), 3),
            "by_length": by_length.means(),
            "by_place": by_place.means(),
        }
        print(json.dumps(line), file=answers, flush=True)


def _prompts(options: argparse.Namespace, tokenizer: Any) -> Mapping[str, list[list[int]]]:
    """Workload -> the token ids of its prompts."""
    if options.preset == EMBEDDED_PRESET:
        from drafters.train.embedded.tokenizer import load_tokenizer
        from drafters.train.evaluation.workloads import held_out_prompts

        return held_out_prompts(load_tokenizer(EMBEDDED / "target"), options.requests)
    prompts = load_prompts(options.workload, options.requests, chat=True)
    return {
        options.workload: [
            tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=False
            )
            for prompt in prompts
        ]
    }


class _Bins:
    """Steps and the tokens that they made, by a place in steps of BIN."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = defaultdict(int)
        self._tokens: dict[int, int] = defaultdict(int)

    def add(self, place: int, tokens: int) -> None:
        begin = place // BIN * BIN
        self._steps[begin] += 1
        self._tokens[begin] += tokens

    def mean(self) -> float:
        return sum(self._tokens.values()) / sum(self._steps.values())

    def means(self) -> dict[int, float]:
        return {begin: round(self._tokens[begin] / self._steps[begin], 2)
                for begin in sorted(self._steps)}  # fmt: skip


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure each limit in a process of its own; returns the exit code."""
    parser = command_parser("context", __doc__)
    add = parser.add_argument
    add("--limits", type=int, nargs="+", default=[0, 416, 256, 128],
        help="limits in tokens, 0 for none [0 416 256 128]")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="of the answers [0]")
    add("--preset", default=EMBEDDED_PRESET, help=f"models and K [{EMBEDDED_PRESET}]")
    add("--workload", default="chat", help="prompts, for another preset than embedded [chat]")
    add("--requests", type=positive_int, default=16, help="of a workload, all in one batch [16]")
    add("--tokens", type=positive_int, default=1400, help="of an answer [1400]")
    add("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        measure(options, options.one)
        return 0
    for limit in options.limits:
        command = [sys.executable, "-m", "bench.parts.context", *argv, "--one", str(limit)]
        if code := subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"an engine ended with code {code}; its error is above")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
