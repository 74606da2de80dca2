"""The table of `aerie bench answers`: validity, equality and speed of each method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.load.figures import quantiles
from bench.load.intervals import interval, ratio, speed
from bench.quality.validity import CUT_OFF, VALID
from bench.sweep.table import accepted_by_source, by_source, pm
from bench.systems.method import Method

SHOWN = 5  # invalid and unequal answers that are shown of a method
Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]  # (method, first prompt) -> a block


def summaries(methods: Sequence[Method], cells: Cells) -> dict[str, dict[str, Any]]:
    """Figures of each method by its name. Ratios and equality are those with the first method."""
    blocks = {
        method: {key[1]: cell for key, cell in cells.items() if key[0] == method.name}
        for method in methods
    }
    base = blocks[methods[0]]
    return {method.name: _summary(blocks[method], base) for method in methods}


def _summary(
    blocks: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    answers = _by_prompt(blocks)
    verdicts = Counter(answer["verdict"] for answer in answers.values())
    kinds = {number: answer["verdict"] for number, answer in answers.items()}
    invalid = {n: kind for n, kind in kinds.items() if kind not in (VALID, CUT_OFF)}
    others = _by_prompt(base)
    unequal = [n for n, answer in answers.items() if not _equal(answer, others[n])]
    speeds = {number: block["tokens_per_second"] for number, block in blocks.items()}
    rounds = sorted(speeds)
    over, over_interval = ratio(speeds, {n: b["tokens_per_second"] for n, b in base.items()})
    return {
        "answers": len(answers),
        "valid": verdicts[VALID],
        "cut_off": verdicts[CUT_OFF],
        "invalid": len(invalid),
        "invalid_answers": dict(list(invalid.items())[:SHOWN]),
        "equal": len(answers) - len(unequal),
        "unequal_answers": unequal[:SHOWN],
        "tokens": sum(answer["tokens"] for answer in answers.values()),
        "tokens_per_second": speed(speeds, rounds),
        "interval": interval(rounds, lambda chosen: speed(speeds, chosen)),
        "over_first": over,
        "over_first_interval": over_interval,
        "accepted_by_source": accepted_by_source(blocks.values()),
        "answer_ms": quantiles([answer["seconds"] for answer in answers.values()]),
        **{
            f"{name}_ms": quantiles([answer[name] for answer in answers.values()])
            for name in ("longest_gap", "last_gap")
        },
        "last_gap_max_ms": round(1e3 * max(a["last_gap"] for a in answers.values()), 1),
    }


def _by_prompt(blocks: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Number of a prompt -> its answer."""
    return {
        first + place: answer
        for first, block in sorted(blocks.items())
        for place, answer in enumerate(block["answers"])
    }


def _equal(answer: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # From a journal calls are lists, from this run tuples.
    return all(
        _lists(answer[name]) == _lists(other[name]) for name in ("text", "calls", "finish_reason")
    )


def _lists(value: Any) -> Any:
    return [list(each) for each in value] if not isinstance(value, str) else value


def table(methods: Sequence[Method], found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The rows of the printed table, a method each."""
    rows = [["method", "valid", "cut off", "invalid", "equal", "tok/s", "over first",
             "answer ms", "longest gap p99 ms", "last gap p99 ms", "last gap max ms",
             "accepted drafts"]]  # fmt: skip
    for method in methods:
        of = found[method.name]
        rows.append([
            method.label,
            *(f"{of[name]}" for name in ("valid", "cut_off", "invalid")),
            f"{of['equal']} of {of['answers']}",
            pm(of["tokens_per_second"], of["interval"], ".1f"),
            pm(of["over_first"], of["over_first_interval"], ".3f"),
            f"{of['answer_ms']['mean']:.0f}",
            f"{of['longest_gap_ms']['p99']:.0f}",
            f"{of['last_gap_ms']['p99']:.0f}",
            f"{of['last_gap_max_ms']:.0f}",
            by_source(of["accepted_by_source"]),
        ])  # fmt: skip
    return rows
