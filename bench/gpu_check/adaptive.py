"""Adaptive K while the load changes, beside no drafts and a fixed K on the same engine.

Requests are kept in flight: as one ends the next begins. The engine is not calibrated, so that
adaptive K learns in a round of the same phases before the one that is measured. Its own round comes
before the others, so that a part that is ended for time has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from time import perf_counter
from typing import Any

from bench.gpu_check.part_report import PartReport
from bench.parts.engine_start import start_table, started
from bench.parts.offline import engine_core, held_out
from bench.systems.commands import Shared, in_process
from bench.systems.method import Method
from drafters.markdown import columns

ARCHITECTURE = {"cuda": "qwen3-8b", "cpu": "toy"}
# Users and seconds, one phase after the other.
PHASES = {"cuda": ((1, 5.0), (64, 7.0), (8, 5.0)), "cpu": ((1, 4.0), (8, 5.0), (2, 4.0))}
K = 7
OUTPUT_TOKENS = 96
ADAPTIVE, LEARNING = "adaptive", "learning"
# Rounds of all phases, in their order. Figures of the first are not kept.
ROUNDS: dict[str, dict[str, Any]] = {
    LEARNING: {"objective": "throughput"},
    ADAPTIVE: {"objective": "throughput"},
    "K=0": {"objective": "off"},
    f"K={K}": {"objective": "fixed", "k": K},
}


def run(report: PartReport) -> None:
    """Measure every round in every phase; the table is shown after each round."""
    phases = PHASES[report.device]
    given: dict[str, Any] = {"max_num_seqs": max(users for users, _ in phases)}
    if report.on_cpu:
        report.skip("compilation and CUDA graphs", "a CPU has another compiler and no graphs")
        given["enforce_eager"] = True
    shared = Shared.of(K, given, "", ARCHITECTURE[report.device], report.folder / "models")
    arguments, _ = in_process(Method("adaptive"), shared)
    llm, start = started(arguments)
    report.add(start=start)
    users_in_flight = SteadyUsers(llm)
    cells: list[dict[str, Any]] = []
    for name, changes in ROUNDS.items():
        for number, (users, seconds) in enumerate(phases):
            cell = users_in_flight.drive(users, seconds, changes)
            if name != LEARNING:
                cells.append({"objective": name, "phase": number, "users": users, **cell})
                report.add(cells=cells)
        if cells:
            lines = [*table(cells), *start_table({"P-EAGLE": start})]
            report.show(lines, says(cells), anew=True)


class SteadyUsers:
    """Requests of an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self._engine, self._scheduler = llm.llm_engine, engine_core(llm).scheduler
        self._names = count()
        self._prompts = held_out(64)
        self._made: dict[str, int] = {}  # request in flight -> its tokens so far

    def drive(self, users: int, seconds: float, changes: dict[str, Any]) -> dict[str, Any]:
        """Keep `users` requests in flight for `seconds`, under an objective; returns the tokens
        per second, what they are made of, and how many steps there were of each K."""
        self._scheduler.speculation("steer", changes)
        while len(self._made) > users:
            name, _ = self._made.popitem()
            self._engine.abort_request([name])
        before, tokens, begun = self._steps(), 0, perf_counter()
        while (spent := perf_counter() - begun) < seconds:
            while len(self._made) < users:
                self._begin()
            tokens += sum(self._step())
        steps = [now - then for now, then in zip(self._steps(), before, strict=True)]
        by_k = {k: number for k, number in enumerate(steps) if number}
        return {
            "seconds": round(spent, 3), "tokens": tokens,
            "tokens_per_second": round(tokens / spent, 1), "steps_by_k": by_k,
        }  # fmt: skip

    def _begin(self) -> None:
        from vllm import SamplingParams

        number = next(self._names)
        prompt: Any = {"prompt_token_ids": self._prompts[number % len(self._prompts)]}
        # Lengths differ, so that requests do not end together.
        length = OUTPUT_TOKENS // 2 + number * 37 % OUTPUT_TOKENS
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        self._engine.add_request(str(number), prompt, sampling)
        self._made[str(number)] = 0

    def _step(self) -> Iterator[int]:
        for output in self._engine.step():
            if output.request_id not in self._made:  # aborted, and its last step still ran
                continue
            made = len(output.outputs[0].token_ids)
            yield made - self._made[output.request_id]
            self._made[output.request_id] = made
            if output.finished:
                del self._made[output.request_id]

    def _steps(self) -> list[int]:
        """Steps so far, by K."""
        steps: list[int] = self._scheduler.speculation("state", {})["totals"]["steps"]
        return list(steps)


def table(cells: list[dict[str, Any]]) -> list[str]:
    """Tokens per second and the K of steps, a row for each phase."""
    names = list(dict.fromkeys(cell["objective"] for cell in cells))
    rows = [["users", *(f"{name}, tokens/s" for name in names), "K that adaptive took"]]
    for number in sorted({cell["phase"] for cell in cells}):
        phase = {cell["objective"]: cell for cell in cells if cell["phase"] == number}
        taken = phase[ADAPTIVE]["steps_by_k"]
        shares = [f"{k}: {n / sum(taken.values()):.0%}" for k, n in taken.items()]
        speeds = [f"{phase[name]['tokens_per_second']:.0f}" for name in names]
        rows.append([str(phase[ADAPTIVE]["users"]), *speeds, ", ".join(shares)])
    return columns(rows)


def says(cells: list[dict[str, Any]]) -> str:
    """Adaptive K over the better of the other rounds so far, in each phase; empty without any."""
    others = [cell for cell in cells if cell["objective"] != ADAPTIVE]
    if not others:
        return ""
    ratios = []
    for ours in (cell for cell in cells if cell["objective"] == ADAPTIVE):
        best = max(c["tokens_per_second"] for c in others if c["phase"] == ours["phase"])
        ratios.append(f"{ours['tokens_per_second'] / best:.2f} at {ours['users']}")
    names = " and ".join(dict.fromkeys(cell["objective"] for cell in others))
    return f"adaptive over the better of {names}: {', '.join(ratios)} users"
