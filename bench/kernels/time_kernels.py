"""`aerie bench kernels`: time and bytes of the drafting path's operations against vLLM's own.

`inputs`: from the target's hidden states to the head's input buffers, without `fc`. Every request
verified K drafts, half of them accepted. `head`: from the head's hidden states to draft tokens.
`draw`, on a GPU: from its logits to drafts of requests with a temperature, top-k and top-p.

Implementations (arms) take turns; a figure is the best of --rounds, in the thread's CPU time or by
the GPU's clock. On a GPU, an arm without work on the host is also timed in a CUDA graph, as
`name (graph)`: the device's time alone. Bytes are counted over the tensors that an arm reads and
writes, not measured; on a GPU, `floor` is the time to copy as many. `vllm` is vLLM's own code, left
out where it is not installed; it enters rejected tokens too. Prints a table, then everything as one
line of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.errors import reports_errors
from bench.kernels.clock import Arm, best, copied_per_us
from bench.kernels.draw import draw
from bench.kernels.head import head
from bench.kernels.inputs import inputs
from bench.parser import command_parser
from bench.provenance import provenance

# batch, K, hidden
INPUTS = [(1, 5, 384), (1, 11, 8192), (16, 5, 384), (16, 7, 2880), (64, 7, 2880), (256, 3, 512),
          (256, 11, 4096)]  # fmt: skip
MORE_INPUTS = [(1, 1, 512), (4, 7, 4096), (64, 3, 8192), (256, 1, 2880), (256, 7, 8192)]
# batch, K, hidden, draft vocabulary, target vocabulary (if both are equal, ids are not mapped)
HEADS = [(1, 5, 384, 8192, 8192), (1, 1, 512, 4096, 32000), (1, 7, 2880, 32000, 200000),
         (16, 5, 2880, 32000, 200000), (64, 7, 512, 4096, 200000), (256, 11, 512, 4096, 200000),
         (1, 11, 8192, 32000, 128000)]  # fmt: skip
MORE_HEADS = [(16, 5, 384, 8192, 8192), (4, 7, 4096, 200000, 200000), (64, 5, 2880, 32000, 200000),
              (256, 1, 4096, 32000, 128000)]  # fmt: skip
# batch, K, vocabulary
DRAWS = [(1, 7, 151936), (16, 5, 32000), (64, 7, 151936)]
# operation -> function that makes its arms, for a case, a dtype and a device
ARMS: dict[str, Callable[..., dict[str, Arm]]] = {"inputs": inputs, "head": head, "draw": draw}


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Time the kernels; returns the exit code."""
    parser = command_parser("kernels", __doc__)
    parser.add_argument("--quick", action="store_true", help="a subset, a few minutes on a core")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=tuple(ARMS))
    parser.add_argument("--out", type=Path, help="append a line of JSON for each case")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("no GPU on this machine")
    if args.device == "cpu" and args.only == "draw":
        raise RuntimeError("draw: a CPU has no such kernel, give --device cuda")
    torch.set_num_threads(args.threads)
    told = provenance(["kernels", *argv])
    told |= {"threads": args.threads, "rounds": args.rounds}
    per_us = copied_per_us(args.rounds) if args.device == "cuda" else None
    results = []
    cases: list[tuple[str, tuple[int, ...]]] = []
    cases += [("inputs", case) for case in INPUTS + ([] if args.quick else MORE_INPUTS)]
    cases += [("head", case) for case in HEADS + ([] if args.quick else MORE_HEADS)]
    if args.device == "cuda":
        cases += [("draw", case) for case in DRAWS]
    for kind, case in cases:
        if args.only not in (None, kind):
            continue
        # The narrowest head is timed in float32 on a CPU, where small models are served in that
        # type; the others are timed in bfloat16.
        dtype = torch.float32 if case[2] == 384 and args.device == "cpu" else torch.bfloat16
        arms = ARMS[kind](*case, dtype, args.device)
        found = best(arms, args.rounds, args.device)
        result = {
            "kind": kind, "case": case, "dtype": str(dtype).removeprefix("torch."),
            "us": {name: round(us, 1) for name, us in found.items()},
            "mb": {name: round(arm.moved / 1e6, 3) for name, arm in arms.items()},
        }  # fmt: skip
        if per_us is not None:
            result["floor_us"] = {name: round(arm.moved / per_us, 1) for name, arm in arms.items()}
        results.append(result)
        print(
            f"{kind:7}{case!s:32}{result['dtype']:9}" + " | ".join(cells(found, result)), flush=True
        )
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps({**told, **result}) + "\n")
    print(json.dumps({**told, "results": results}))
    return 0


def cells(found: dict[str, float], result: dict[str, Any]) -> list[str]:
    """A text for each arm: its time, the bytes that it moves, and its speed-up over vLLM's arm
    (over that in a graph, for an arm in a graph, if there is one)."""
    told = []
    for name, us in found.items():
        arm = name.removesuffix(" (graph)")
        text = f"{name} {us:.0f} us {result['mb'][arm]:.2f} MB"
        if "floor_us" in result:
            text += f" floor {result['floor_us'][arm]:.0f} us"
        stock = found.get(name.replace(arm, "vllm"), found.get("vllm"))
        told.append(text if stock is None else f"{text} ({stock / us:.2f}x)")
    return told
