"""`aerie simulate`: replay published tables, then run adaptive K on the same simulated engines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.errors import reports_errors
from bench.simulate.ablation import MechanismWorth, ablation, on_cpu
from bench.simulate.compare import STEPS, Moving, Steady, moving, steady, traces
from bench.simulate.fit import Ratio, cpu, published, replay
from bench.simulate.measured import measured
from drafters.markdown import columns
from drafters.train.number_options import positive_int

SEED = 1


@reports_errors("aerie simulate")
def main(argv: Sequence[str]) -> int:
    """Run `aerie simulate`, print its tables; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.ablation and arguments.plot is not None:
        parser.error("--plot draws nothing of --ablation")
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        parser.error(f"--plot {arguments.plot}: there is no such folder")
    machine = None
    if arguments.costs is not None:
        machine = measured(arguments.costs, arguments.acceptance)
    if arguments.ablation:
        hardware, survival = cpu() if machine is None else (machine.hardware, machine.survival)
        seeds = range(arguments.seed, arguments.seed + arguments.replicas)
        worths = list(ablation(on_cpu(hardware, survival), seeds, arguments.steps))
        print(_worths(worths))
        if arguments.json:
            print(json.dumps({"ablation": [asdict(worth) for worth in worths]}, allow_nan=False))
        return 0
    played = replay()
    places = [*played.places, *(machine.places if machine is not None else ())]
    steadies = [
        steady(place, arguments.seed + i, arguments.steps) for i, place in enumerate(places)
    ]
    last = machine.places[-1] if machine is not None else None
    loads = [moving(name, arguments.seed, arguments.replicas, last) for name in traces()]
    device = published()["cpu"]["hardware"] if machine is None else str(arguments.costs)
    print(_report(played.ratios, steadies, loads, device))
    if machine is not None:
        errors = machine.errors
        print(
            f"measured: {arguments.costs}, {len(errors)} steps, error of the fit: "
            f"median {100 * median(errors):.1f}%, worst {100 * max(errors):.1f}%"
        )
    if arguments.plot is not None:
        _draw(arguments.plot, played.ratios, loads)
    if arguments.json:
        print(json.dumps(_document(played.ratios, steadies, loads), allow_nan=False))
    return 0


def _draw(file: Path, ratios: Sequence[Ratio], loads: Sequence[Moving]) -> None:
    """Write the plots. Raises NoPlots without matplotlib, which nothing else here needs."""
    from bench.simulate.plot import figure_of
    from bench.sweep.plots import svg

    file.write_text(svg(figure_of(ratios, loads)), "utf-8")
    print(f"plot: {file}")


def _report(
    ratios: Sequence[Ratio], steadies: Sequence[Steady], loads: Sequence[Moving], machine: str
) -> str:
    lines = ["Published speedups of P-EAGLE at fixed K, replayed (* used in the fit):"]
    for name in dict.fromkeys(ratio.table for ratio in ratios):
        facts = published()[name]
        lines.append(f"  {name}: {facts['hardware']} ({facts['source']})")
    rows = [["table", "workload", "c", "over", "published", "simulated", "error"]]
    for r in ratios:
        mark = " *" if r.fitted else ""
        figures = [f"{r.published:.2f}", f"{r.simulated:.2f}", f"{100 * r.error:+.1f}%{mark}"]
        rows.append([r.table, r.workload, str(r.concurrency), r.over, *figures])
    lines += columns(rows)
    for label, errors in (("all", _errors(ratios)), ("held out", _errors(ratios, fitted=False))):
        lines.append(
            f"absolute error, {label}, {len(errors)} cells: "
            f"median {100 * median(errors):.1f}%, worst {100 * max(errors):.1f}%"
        )
    lines += ["", "Adaptive K at the same places, its start included:"]
    rows = [["table", "workload", "c", "best K", "last K", "over none", "over best", "probes"]]
    for s in steadies:
        place = s.place
        ks = [str(place.concurrency), str(s.best_k), str(s.last_k)]
        shares = [f"{s.over_none:.2f}", f"{s.over_best:.3f}", f"{100 * s.probe_share:.2f}%"]
        rows.append([place.table, place.workload, *ks, *shares])
    lines += columns(rows)
    lines += ["", f"Moving load ({machine}), in tokens/s:"]
    counts = sorted(loads[0].fixed)
    heads = ["trace", *(f"K={k}" for k in counts), "adaptive", "over best", "oracle", "probes"]
    rows = [heads]
    for m in loads:
        shares = [f"{m.over_best:.3f}", f"{m.oracle_over_best:.3f}", f"{100 * m.probe_share:.2f}%"]
        speeds = [*(f"{m.fixed[k]:.0f}" for k in counts), f"{m.adaptive:.0f}"]
        rows.append([m.name, *speeds, *shares])
    lines += columns(rows)
    lines.append("oracle: over the best fixed K too, with the true best K in every step.")
    lines.append("Poisson: tokens per second of requests' time in the engine or its queue.")
    return "\n".join(lines)


def _worths(worths: Iterable[MechanismWorth]) -> str:
    rows = [["switched off", "steady loads", "moving loads", "shared machine", "gauge, shared"]]
    for worth in worths:
        ratios = [
            f"{ratio:.3f} ± {half:.3f}"
            for ratio, half in (
                (worth.steady, worth.steady_interval), (worth.moving, worth.moving_interval),
                (worth.shared, worth.shared_interval),
            )
        ]  # fmt: skip
        errors = f"{100 * worth.gauge_error:.1f}%, {100 * worth.shared_gauge_error:.1f}%"
        rows.append([worth.name, *ratios, errors])
    note = (
        "Tokens/s without it over tokens/s with all; ± half of the 95% interval. Then the error of "
        "the speed-up gauge under steady loads: on a machine of its own, and on a shared one."
    )
    return "\n".join([*columns(rows), note])


def _document(
    ratios: Sequence[Ratio], steadies: Sequence[Steady], loads: Sequence[Moving]
) -> dict[str, Any]:
    everything, held_out = _errors(ratios), _errors(ratios, fitted=False)
    probes = [*(s.probe_share for s in steadies), *(m.probe_share for m in loads)]
    return {
        "cells": len(everything),
        "median_error": round(median(everything), 4),
        "worst_error": round(max(everything), 4),
        "held_out_cells": len(held_out),
        "held_out_median_error": round(median(held_out), 4),
        "held_out_worst_error": round(max(held_out), 4),
        "worst_adaptive": round(min(s.over_best for s in steadies), 4),
        "worst_probe_share": round(max(probes), 5),
        "traces": {
            m.name: {"over_best": round(m.over_best, 4), "oracle": round(m.oracle_over_best, 4)}
            for m in loads
        },
    }


def _errors(ratios: Sequence[Ratio], fitted: bool = True) -> list[float]:
    """Absolute errors, with or without those of cells that were used in the fit."""
    return [abs(ratio.error) for ratio in ratios if fitted or not ratio.fitted]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerie simulate", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="write plots (needs matplotlib)"
    )
    parser.add_argument(
        "--costs", type=Path, metavar="FILE.jsonl",
        help="results of `aerie bench device` or `sweep`: that machine is simulated too, and used "
        "under the moving loads",
    )  # fmt: skip
    parser.add_argument(
        "--acceptance", type=_shares, default=(), metavar="S,S",
        help="share of drafts accepted up to each position, for --costs [HumanEval's, published]",
    )  # fmt: skip
    parser.add_argument(
        "--ablation", action="store_true",
        help="instead of all this: what each mechanism of the controller is worth, switched off in "
        "turn, with 1, 4, 16 and 32 users",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--replicas", type=positive_int, default=1, metavar="N",
        help="engines under each moving load, every one with its own controller; runs of each load "
        "with --ablation [1]",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=positive_int, default=STEPS, metavar="N",
        help=f"steps at each published place, and of a steady load with --ablation [{STEPS}]",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"[{SEED}]")
    return parser


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(map(float, text.split(",")))
    if any(not 0.0 <= b <= a for a, b in pairwise((1.0, *shares))):
        raise argparse.ArgumentTypeError(f"shares must be from 0 to 1 and must not rise: {text}")
    return shares
