"""A server's counters, from its /metrics page before and after a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATH = "/metrics"
_VLLM = "vllm:spec_decode_num_"
# name -> the label by which its values are kept apart; other labels (engine, model) are summed over
_WANTED = {
    f"{_VLLM}drafts_total": "",
    f"{_VLLM}draft_tokens_total": "",
    f"{_VLLM}accepted_tokens_total": "",
    f"{_VLLM}accepted_tokens_per_pos_total": "position",
    "vllm:generation_tokens_total": "",
    "vllm:prompt_tokens_total": "",
    "aerie_steps_total": "k",
    "aerie_drafts_verified_total": "position",
    "aerie_drafts_accepted_total": "position",
    "aerie_source_drafts_verified_total": "source",
    "aerie_source_drafts_accepted_total": "source",
    "aerie_step_seconds_total": "phase",
    "aerie_decode_seconds_total": "",
    "aerie_decode_seconds_without_drafts_total": "",
    "aerie_k_switches_total": "",
    "aerie_probe_seconds_total": "",
}


@dataclass(frozen=True)
class Counters:
    """Counter values: (name, label) -> value."""

    values: dict[tuple[str, str], float]

    @classmethod
    def read(cls, page: str) -> Counters:
        """Parse the counters in a page of Prometheus text."""
        lines = [line for line in page.splitlines() if line.split(" ")[0].split("{")[0] in _WANTED]
        wanted = "".join(line + "\n" for line in lines)
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                key = sample.name, sample.labels.get(_WANTED[sample.name], "")
                values[key] = values.get(key, 0.0) + sample.value
        return cls(values)

    def since(self, before: Counters) -> Counters:
        """The increase of each counter since `before`."""
        return Counters({k: v - before.values.get(k, 0.0) for k, v in self.values.items()})

    def entry(self) -> dict[str, dict[str, float]]:
        """Name -> label -> value, without those that are 0, to be written as JSON."""
        found: dict[str, dict[str, float]] = {}
        for (name, label), value in self.values.items():
            if value:
                found.setdefault(name, {})[label] = value
        return found

    @classmethod
    def total(cls, entries: Iterable[Mapping[str, Mapping[str, float]]]) -> Counters:
        """The sum of what `entry` wrote."""
        values: dict[tuple[str, str], float] = {}
        for entry in entries:
            for name, labels in entry.items():
                for label, value in labels.items():
                    values[name, label] = values.get((name, label), 0.0) + value
        return cls(values)

    def get(self, name: str) -> float:
        """Value of a metric that has no label here; 0 if the server lacks it."""
        return self.values.get((name, ""), 0.0)

    def labelled(self, name: str) -> dict[str, float]:
        """Values of a metric by its label's value; empty if the server lacks the metric."""
        return {label: v for (n, label), v in self.values.items() if n == name and label}

    def by(self, name: str) -> dict[int, float]:
        """Values of a metric whose label is a number, position or K, in ascending order. Raises
        ValueError if a label is not a whole number."""
        return dict(sorted((int(label), v) for label, v in self.labelled(name).items()))


def speculation(grown: Counters) -> dict[str, Any]:
    """Acceptance, K and the gateway's own speed-up estimate, from the increases of counters.

    `acceptance_length` is tokens per drafted step, 1 + accepted / drafts. `acceptance` by position
    is per drafted step too, so that its sum is the length less 1, and servers that verify all
    drafts compare with those that do not. (The gateway's own metrics are per draft verified at the
    position.) `k_mean` is over all steps if the server counts them, those without drafts included.
    `control` is the seconds lost by probes and taken by the policy, over those of all steps that
    made tokens. `sources` has draft tokens verified and accepted, by source.
    """
    found: dict[str, Any] = {}
    drafts, drafted = grown.get(f"{_VLLM}drafts_total"), grown.get(f"{_VLLM}draft_tokens_total")
    if drafts:
        length = 1 + grown.get(f"{_VLLM}accepted_tokens_total") / drafts
        found |= {"acceptance_length": round(length, 4), "k_mean": round(drafted / drafts, 3)}
        accepted = grown.by(f"{_VLLM}accepted_tokens_per_pos_total")
        found["acceptance"] = [round(value / drafts, 4) for value in accepted.values()]
    sources = _by_source(grown)
    if sources:
        found["sources"] = sources
    steps = grown.by("aerie_steps_total")
    if total := sum(steps.values()):
        found["k_mean"] = round(sum(k * count for k, count in steps.items()) / total, 3)
        found["steps"] = {str(k): int(count) for k, count in steps.items() if count}
        # The page may have later positions, of a larger K before.
        if drafts and sources.keys() <= {"head"}:
            found["acceptance"] = found["acceptance"][: max(map(int, found["steps"]))]
    decode = grown.get("aerie_decode_seconds_total")
    if decode > 0:
        plain = grown.get("aerie_decode_seconds_without_drafts_total")
        found["decode_seconds"] = round(decode, 4)
        found["gauge"] = round(plain / decode, 4)
        probes = grown.get("aerie_probe_seconds_total")
        deciding = grown.labelled("aerie_step_seconds_total").get("control", 0.0)
        found["probe_seconds"] = round(probes, 4)
        found["control"] = round((probes + deciding) / decode, 5)
    return found


def _by_source(grown: Counters) -> dict[str, dict[str, int]]:
    """Draft tokens verified and accepted, of each source that had any."""
    accepted = grown.labelled("aerie_source_drafts_accepted_total")
    verified = grown.labelled("aerie_source_drafts_verified_total")
    return {
        source: {"drafted": int(count), "accepted": int(accepted.get(source, 0.0))}
        for source, count in verified.items()
        if count
    }
