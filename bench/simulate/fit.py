"""Fit simulated hardware to published speeds, and predict the rest of each published table.

Costs are fitted to the speeds of one workload at every second concurrency; the rest of the table
is held out. Acceptance is fitted only where it is not published.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from bench.simulate.curve import from_length, from_lengths
from bench.simulate.hardware import Hardware
from bench.simulate.minimise import minimise

FITTED_WORKLOAD = "HumanEval"
NONE, P_EAGLE, EAGLE_3 = "none", "p-eagle", "eagle-3"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A published speedup of P-EAGLE, and the simulated one."""

    table: str
    workload: str
    concurrency: int
    over: str
    published: float
    simulated: float
    fitted: bool  # a speed or a ratio of this cell was used in the fit

    @property
    def error(self) -> float:
        """Relative error of the simulation, signed."""
        return self.simulated / self.published - 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """A place at which adaptive K is compared with fixed K: hardware, acceptance, concurrency."""

    table: str
    workload: str
    concurrency: int
    k_max: int
    hardware: Hardware
    survival: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """One published table, replayed."""

    ratios: tuple[Ratio, ...]
    places: tuple[Place, ...]


@cache
def published() -> dict[str, Any]:
    """The published figures with their sources."""
    text = (files("bench.simulate") / "published.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def replay() -> Replay:
    """Replay every published table."""
    parts = [_blog(), _launch(), _paper()]
    return Replay(
        tuple(ratio for part in parts for ratio in part.ratios),
        tuple(place for part in parts for place in part.places),
    )


@cache
def cpu() -> tuple[Hardware, tuple[float, ...]]:
    """The CPU engine: costs fitted to its twelve measured speeds, and its acceptance."""
    table = published()["cpu"]
    (k, tokens) = next(iter(table["length"].items()))
    survival = from_length(int(k), tokens)
    speeds = [
        (requests, int(k), speed)
        for k, column in table["tokens_per_second"].items()
        for requests, speed in zip(table["concurrency"], column, strict=True)
    ]

    def hardware(p: Sequence[float]) -> Hardware:
        return Hardware(p[0], p[1], 0.0, 0.0, p[2], p[3], p[4])

    fitted = minimise(
        lambda p: sum(
            math.log(hardware(p).rate(n, k, survival) / speed) ** 2 for n, k, speed in speeds
        ),
        [4e-3, 1e-5, 1e-4, 1e-3, 1e-4],
    )
    return hardware(fitted), tuple(survival)


@cache
def curves() -> dict[tuple[str, str], list[float]]:
    """(workload, method) -> share accepted up to each position, for the blog's GPT-OSS-20B."""
    return {
        (workload, method): from_lengths(3, lengths["3"], 7, lengths["7"])
        for workload, table in published()["blog"]["workloads"].items()
        for method, lengths in table["length"].items()
    }


@cache
def _b200() -> dict[str, Hardware]:
    """GPT-OSS-20B on a B200 with each method's drafter."""
    table = published()["blog"]
    touched = table["experts"]["per_token"] / table["experts"]["total"]
    speeds = [
        (method, requests, table["workloads"][FITTED_WORKLOAD][method][i])
        for method in (NONE, P_EAGLE, EAGLE_3)
        for i, requests in enumerate(table["concurrency"])
        if _is_fitted(FITTED_WORKLOAD, i)
    ]

    def hardware(p: Sequence[float]) -> dict[str, Hardware]:
        parallel = Hardware(p[0], p[1], p[2], touched, p[3], p[4], p[5])
        sequential = replace(parallel, drafter=p[6], drafter_token=p[7], parallel=False)
        return {NONE: parallel, P_EAGLE: parallel, EAGLE_3: sequential}

    def loss(p: Sequence[float]) -> float:
        device = hardware(p)
        return sum(
            math.log(_rate(device, method, FITTED_WORKLOAD, requests, table["k"]) / speed) ** 2
            for method, requests, speed in speeds
        )

    return hardware(minimise(loss, [1e-3, 3e-5, 2e-3, 5e-6, 5e-4, 2e-6, 3e-4, 2e-6]))


def _is_fitted(workload: str, row: int) -> bool:
    return workload == FITTED_WORKLOAD and row % 2 == 0


def _rate(
    device: dict[str, Hardware], method: str, workload: str, requests: int, ks: dict[str, int]
) -> float:
    if method == NONE:
        return device[NONE].rate(requests, 0, [])
    return device[method].rate(requests, ks[method], curves()[workload, method])


def _blog() -> Replay:
    table, device = published()["blog"], _b200()
    ratios, places = [], []
    for workload, columns in table["workloads"].items():
        for i, requests in enumerate(table["concurrency"]):
            over_none = columns[P_EAGLE][i] / columns[NONE][i]
            ours = _rate(device, P_EAGLE, workload, requests, table["k"])
            for over, value in ((NONE, over_none), (EAGLE_3, columns["over_eagle_3"][i])):
                other = _rate(device, over, workload, requests, table["k"])
                fitted = _is_fitted(workload, i)
                ratios.append(Ratio("blog", workload, requests, over, value, ours / other, fitted))
            survival = tuple(curves()[workload, P_EAGLE])
            k_max = table["k"][P_EAGLE]
            places.append(Place("blog", workload, requests, k_max, device[P_EAGLE], survival))
    return Replay(tuple(ratios), tuple(places))


def _launch() -> Replay:
    """The launch article: another target on the same GPU, whose acceptance is not published.

    Two factors of the B200's costs, and one acceptance for each workload and method, are fitted to
    the figures at c = 1 and to one at c = 128; the others are held out.
    """
    table, base = published()["launch"], _b200()
    touched = table["experts"]["per_token"] / table["experts"]["total"]
    entries = [tuple(entry) for entry in table["ratios"]]
    fitted = [e for e in entries if e[1] == 1 or e[:3] == (FITTED_WORKLOAD, 128, NONE)]
    workloads = list(dict.fromkeys(entry[0] for entry in entries))

    def build(p: Sequence[float]) -> tuple[dict[str, Hardware], dict[tuple[str, str], list[float]]]:
        fixed, growing, *lengths = p
        device = {
            method: replace(
                hardware,
                base=fixed * hardware.base,
                experts=fixed * hardware.experts,
                touched=touched,
                request=growing * hardware.request,
                drafter_token=growing * hardware.drafter_token,
            )
            for method, hardware in base.items()
        }
        kinds = [(w, m) for w in workloads for m in (P_EAGLE, EAGLE_3)]
        curves = {
            kind: from_length(7, 1.0 + extra) for kind, extra in zip(kinds, lengths, strict=True)
        }
        return device, curves

    def ratio(built: Any, workload: str, requests: int, over: str) -> float:
        def best(method: str) -> float:
            device, curves = built
            if method == NONE:
                return device[NONE].rate(requests, 0, [])
            survival = curves[workload, method]
            return max(device[method].rate(requests, k, survival) for k in table["k"])

        return best(P_EAGLE) / best(over)

    def loss(p: Sequence[float]) -> float:
        built = build(p)
        plain = built[0][NONE].rate(1, 0, [])
        error = math.log(plain / table["tokens_per_second"][NONE]) ** 2
        return error + sum(math.log(ratio(built, w, n, o) / v) ** 2 for w, n, o, v in fitted)

    built = build(minimise(loss, [1.5, 1.0, 4.0, 2.5, 3.0, 2.0]))
    ratios = [
        Ratio("launch", w, n, o, v, ratio(built, w, n, o), (w, n, o, v) in fitted)
        for w, n, o, v in entries
    ]
    device, curves = built
    places = [
        Place("launch", w, n, max(table["k"]), device[P_EAGLE], tuple(curves[w, P_EAGLE]))
        for w, n in dict.fromkeys(entry[:2] for entry in entries)
    ]
    return Replay(tuple(ratios), tuple(places))


def _paper() -> Replay:
    """The paper: the blog's target on an H200. Two factors of costs are fitted at C = 2; C = 4 is
    held out."""
    table, base = published()["paper"], _b200()
    workloads = table["workloads"]

    def build(p: Sequence[float]) -> dict[str, Hardware]:
        return {
            method: replace(
                hardware,
                base=p[0] * hardware.base,
                request=p[0] * hardware.request,
                experts=p[0] * hardware.experts,
                drafter=p[1] * hardware.drafter,
                drafter_token=p[1] * hardware.drafter_token,
            )
            for method, hardware in base.items()
        }

    def loss(p: Sequence[float]) -> float:
        device = build(p)
        return sum(
            math.log(_rate(device, m, w, table["concurrency"][0], table["k"]) / speeds[0]) ** 2
            for w, columns in workloads.items()
            for m, speeds in columns.items()
        )

    device = build(minimise(loss, [1.0, 1.0]))
    ratios, places = [], []
    for workload, columns in workloads.items():
        for i, requests in enumerate(table["concurrency"]):
            value = columns[P_EAGLE][i] / columns[EAGLE_3][i]
            ours, other = (
                _rate(device, m, workload, requests, table["k"]) for m in (P_EAGLE, EAGLE_3)
            )
            ratios.append(Ratio("paper", workload, requests, EAGLE_3, value, ours / other, i == 0))
            survival = tuple(curves()[workload, P_EAGLE])
            k_max = table["k"][P_EAGLE]
            places.append(Place("paper", workload, requests, k_max, device[P_EAGLE], survival))
    return Replay(tuple(ratios), tuple(places))
