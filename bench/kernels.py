"""Time and bytes of the drafting path's operations against vLLM's own.

    python -m bench.kernels [--quick] [--device cuda] [--out FILE.jsonl]

`inputs`: from the target's hidden states to the head's input buffers, without `fc`. Every request
verified K drafts, half of them accepted. `head`: from the head's hidden states to draft tokens.
Arms take turns, best of --rounds each, in the thread's CPU seconds or on the GPU's clock. Bytes
are those of the tensors that an arm reads and writes, counted, not measured. `vllm` is vLLM's own
code, left out where it is not installed; it enters rejected tokens too. Prints a table, then all
of it as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from drafters.ops import reference
from drafters.ops.gather import gather
from drafters.vllm.layout import Rows, lay_out

Arm = tuple[Callable[[], Any], int]  # what to time, and the bytes it moves
TAPS, BLOCK, MASK, CONTEXT, WINDOW = 3, 16, 3, 200, 256
NAMES = ("index", "slot", "start", "scheduled", "end", "k", "newest")

# batch, K, hidden
INPUTS = [(1, 5, 384), (1, 11, 8192), (16, 5, 384), (16, 7, 2880), (64, 7, 2880), (256, 3, 512),
          (256, 11, 4096)]  # fmt: skip
MORE_INPUTS = [(1, 1, 512), (4, 7, 4096), (64, 3, 8192), (256, 1, 2880), (256, 7, 8192)]
# batch, K, hidden, draft vocabulary, target vocabulary (the same: no mapping)
HEADS = [(1, 5, 384, 8192, 8192), (1, 1, 512, 4096, 32000), (1, 7, 2880, 32000, 200000),
         (16, 5, 2880, 32000, 200000), (64, 7, 512, 4096, 200000), (256, 11, 512, 4096, 200000),
         (1, 11, 8192, 32000, 128000)]  # fmt: skip
MORE_HEADS = [(16, 5, 384, 8192, 8192), (4, 7, 4096, 200000, 200000), (64, 5, 2880, 32000, 200000),
              (256, 1, 4096, 32000, 128000)]  # fmt: skip


def inputs(batch: int, k: int, hidden: int, dtype: torch.dtype, device: str) -> dict[str, Arm]:
    """Arms for one step of `batch` requests."""
    every, read = np.arange(batch, dtype=np.int64), k + 1
    accepted = k // 2 + 1  # with the target's own token
    rows = Rows(every, every, every * 0, every * 0 + CONTEXT, every * 0 + CONTEXT,
                every * 0 + CONTEXT + accepted, every * 0 + k, every + 7)  # fmt: skip
    blocks = (CONTEXT + 2 * read) // BLOCK + 1
    given: dict[str, Any] = {
        "tokens": np.random.default_rng(0).integers(4, 4000, (batch, 4096)).astype(np.int32),
        "tables": np.random.default_rng(1).permutation(batch * blocks).reshape(batch, blocks),
        "starts": (np.arange(batch + 1) * read).astype(np.int32),
        "block_size": BLOCK, "window": WINDOW, "mask_token": MASK,
    }  # fmt: skip
    given["tables"] = given["tables"].astype(np.int32)
    states = [torch.randn(batch * read, hidden).to(device, dtype) for _ in range(TAPS)]
    shared = torch.randn(hidden).to(device, dtype)
    entered, tokens = batch * accepted, batch * (accepted + k - 1)
    combined = torch.randn(batch * read, hidden).to(device, dtype)
    longest = batch * 2 * read
    ids = torch.zeros(longest, dtype=torch.int32, device=device)
    positions = torch.zeros(longest, dtype=torch.int64, device=device)
    buffer = torch.zeros((longest, hidden), dtype=dtype, device=device)
    each = hidden * states[0].element_size()

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def served() -> None:  # what drafters/vllm/drafter.py does
        layout = lay_out(rows, **given)
        ids[:tokens], positions[:tokens] = put(layout.ids), put(layout.positions)
        chosen = put(layout.fresh_from)
        torch.cat([state.index_select(0, chosen) for state in states], dim=-1)
        buffer[put(layout.fresh)] = combined[:entered]
        if layout.masked.size:
            buffer[put(layout.masked)] = shared
        put(layout.slots)

    gathered = torch.empty((entered, TAPS * hidden), dtype=dtype, device=device)

    nothing_kept = torch.empty((0, TAPS * hidden), dtype=dtype, device=device)

    def once() -> None:  # the same with every hidden state copied once
        layout = lay_out(rows, **given)
        ids[:tokens].copy_(put(layout.ids))
        positions[:tokens].copy_(put(layout.positions))
        chosen = put(layout.fresh_from)
        gather(states, chosen, nothing_kept, chosen[:0], gathered)
        buffer.index_copy_(0, put(layout.fresh), combined[:entered])
        if layout.masked.size:
            buffer.index_copy_(0, put(layout.masked), shared.expand(len(layout.masked), -1))
        put(layout.slots)

    def host() -> None:  # the integers alone
        lay_out(rows, **given)

    spread = (2 * entered + tokens - entered) * each
    arms: dict[str, Arm] = {
        "served": (served, 4 * TAPS * entered * each + spread),
        "once": (once, 2 * TAPS * entered * each + spread),
        "layout": (host, 20 * tokens),
    }
    if device == "cpu" or find_spec("vllm"):
        stock = _stock(given, states, combined, shared, k, batch, ids, positions, buffer)
        total, width = batch * read, batch * (read + k - 1)
        arms = {"vllm": (stock, 2 * (TAPS + 1) * total * each + 2 * width * each), **arms}
    if device != "cpu":
        from drafters.ops import inputs_triton

        found, _, _ = reference.requests(*(torch.from_numpy(getattr(rows, n)) for n in NAMES))
        store = torch.empty((batch * WINDOW, TAPS * hidden), dtype=dtype, device=device)
        there = {name: put(given[name]) for name in ("tokens", "tables", "starts")}
        slots = torch.empty(tokens, dtype=torch.int64, device=device)

        def fused() -> None:
            packed = inputs_triton.pack(found).to(device, non_blocking=True)
            inputs_triton.enter(
                packed, states=states, store=store, block_size=BLOCK, window=WINDOW,
                mask_token=MASK, ids=ids[:tokens], positions=positions[:tokens], slots=slots,
                gathered=gathered, **there,
            )  # fmt: skip
            inputs_triton.spread(packed, combined[:entered], shared, buffer[:tokens])

        arms["triton"] = (fused, 2 * TAPS * entered * each + (entered + tokens) * each)
    return arms


def _stock(
    given: dict[str, Any], states: list[torch.Tensor], combined: torch.Tensor,
    shared: torch.Tensor, k: int, batch: int, ids: torch.Tensor, positions: torch.Tensor,
    buffer: torch.Tensor,
) -> Callable[[], None]:  # fmt: skip
    """Concatenation of the taps as in vLLM's runner, then its `set_inputs_first_pass`."""
    _prepare_vllm()
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    device, read = combined.device, k + 1
    starts = torch.from_numpy(given["starts"])
    proposer = SimpleNamespace(
        use_heterogeneous_vocab=False, needs_extra_input_slots=True,
        net_num_new_slots_per_request=k - 1, extra_slots_per_request=k, device=device,
        input_ids=ids, positions=positions, hidden_states=buffer, block_size=BLOCK,
        is_rejected_token_mask=torch.zeros(len(ids), dtype=torch.bool, device=device),
        is_masked_token_mask=torch.zeros(len(ids), dtype=torch.bool, device=device),
        parallel_drafting_token_id=MASK, pass_hidden_states_to_model=True,
        parallel_drafting_hidden_state_tensor=shared, max_model_len=4096,
        arange=torch.arange(4096, dtype=torch.int32, device=device),
    )  # fmt: skip
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(device), query_start_loc_cpu=starts,
        seq_lens=torch.full((batch,), CONTEXT + read, dtype=torch.int32, device=device),
        num_reqs=batch, num_actual_tokens=batch * read, max_query_len=read,
        max_seq_len=CONTEXT + read, block_table_tensor=torch.from_numpy(given["tables"]).to(device),
        slot_mapping=torch.zeros(batch * read, dtype=torch.int64, device=device),
    )  # fmt: skip
    target_ids = torch.full((batch * read,), 9, dtype=torch.int32, device=device)
    places = (torch.arange(read, device=device) + CONTEXT).repeat(batch)
    newest = torch.arange(batch, dtype=torch.int32, device=device)
    rejected = torch.full((batch,), k - k // 2, dtype=torch.int32, device=device)

    def stock() -> None:
        torch.cat(states, dim=-1)
        SpecDecodeBaseProposer.set_inputs_first_pass(
            proposer, target_ids, newest, places, combined, None, common, rejected
        )

    return stock


@cache
def _prepare_vllm() -> None:
    """As a worker does before it imports the proposer: C++ in Triton's place on a CPU."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def head(
    batch: int, k: int, hidden: int, words: int, target: int, dtype: torch.dtype, device: str
) -> dict[str, Arm]:
    """Arms for the draft head over `batch * k` rows."""
    rows = batch * k
    states = torch.randn(rows, hidden).to(device, dtype)
    weight = torch.randn(words, hidden, device=device, dtype=dtype)
    offsets = None
    if target != words:
        kept = torch.randperm(target)[:words].sort().values
        offsets = (kept - torch.arange(words)).to(device)

    def stock() -> torch.Tensor:  # llama_eagle3.py, compute_logits, and argmax
        logits = torch.nn.functional.linear(states, weight)
        if offsets is None:
            return logits.argmax(-1)
        every = logits.new_full((rows, target), float("-inf"))
        every[:, torch.arange(words, device=device) + offsets] = logits
        return every.argmax(-1)

    def served() -> torch.Tensor:  # drafters/vllm/drafter.py
        ids = torch.nn.functional.linear(states, weight).argmax(-1)
        return ids if offsets is None else ids + offsets[ids]

    def largest() -> torch.Tensor:  # the same by `max`, which is vectorised where `argmax` is not
        ids = torch.nn.functional.linear(states, weight).max(-1).indices
        return ids if offsets is None else ids + offsets[ids]

    def blocked(step: int = 4096) -> torch.Tensor:  # no more logits than a cache holds
        best = torch.full((rows,), float("-inf"), dtype=dtype, device=device)
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        for begin in range(0, words, step):
            top, here = torch.nn.functional.linear(states, weight[begin : begin + step]).max(-1)
            better = top > best
            best, ids = torch.where(better, top, best), torch.where(better, here + begin, ids)
        return ids if offsets is None else ids + offsets[ids]

    assert torch.equal(stock(), served()) and torch.equal(served(), largest())
    size = weight.element_size()
    read, logits = (words + rows) * hidden * size, rows * words * size
    mapped = (2 * rows * target + rows * words) * size if offsets is not None else 0
    arms: dict[str, Arm] = {
        "vllm": (stock, read + 2 * logits + mapped),
        "served": (served, read + 2 * logits),
        "max": (largest, read + 2 * logits),
        "blocked": (blocked, read + 2 * logits),
    }
    if device != "cpu":
        from drafters.ops import head_triton

        arms["triton"] = (lambda: head_triton.likeliest(states, weight, offsets), read)
    return arms


def best(arms: dict[str, Arm], rounds: int, device: str) -> dict[str, float]:
    """Microseconds of each arm; they take turns."""
    found = dict.fromkeys(arms, float("inf"))
    for call, _ in arms.values():
        call()
    for _ in range(rounds):
        for name, (call, _) in arms.items():
            found[name] = min(found[name], _seconds(call, device) * 1e6)
    return found


def _seconds(call: Callable[[], Any], device: str) -> float:
    """CPU seconds of this thread: others share the core. On a GPU, its own clock."""
    if device == "cpu":
        begun = time.thread_time()
        call()
        return time.thread_time() - begun
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def provenance(device: str, rounds: int) -> dict[str, Any]:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "cpu"
    return {
        "commit": git.stdout.strip(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__,
        "rounds": rounds,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a subset, a few minutes on a core")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("inputs", "head"))
    parser.add_argument("--out", type=Path, help="append a line of JSON for each case")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench.kernels: no GPU on this machine", file=sys.stderr)
        return 1
    torch.set_num_threads(args.threads)
    told, results = provenance(args.device, args.rounds), []
    cases = [("inputs", case) for case in INPUTS + ([] if args.quick else MORE_INPUTS)]
    cases += [("head", case) for case in HEADS + ([] if args.quick else MORE_HEADS)]
    for kind, case in cases:
        if args.only not in (None, kind):
            continue
        # The embedded models' width runs in float32, as served; others in bfloat16.
        dtype = torch.float32 if case[2] == 384 and args.device == "cpu" else torch.bfloat16
        arms = (inputs if kind == "inputs" else head)(*case, dtype, args.device)  # type: ignore[operator]
        found = best(arms, args.rounds, args.device)
        result = {
            "kind": kind, "case": case, "dtype": str(dtype).removeprefix("torch."),
            "us": {name: round(us, 1) for name, us in found.items()},
            "mb": {name: round(moved / 1e6, 3) for name, (_, moved) in arms.items()},
        }  # fmt: skip
        results.append(result)
        cells = (
            f"{name} {us:.0f} us {arms[name][1] / 1e6:.2f} MB ({found['vllm'] / us:.2f}x)"
            if "vllm" in found else f"{name} {us:.0f} us {arms[name][1] / 1e6:.2f} MB"
            for name, us in found.items()
        )  # fmt: skip
        print(f"{kind:7}{case!s:32}{result['dtype']:9}" + " | ".join(cells), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps({**told, **result}) + "\n")
    print(json.dumps({**told, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
