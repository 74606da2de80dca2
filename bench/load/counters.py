"""What a server counted: its /metrics page before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATH = "/metrics"
_VLLM = "vllm:spec_decode_num_"
# name -> the label that tells its samples apart; others are summed over (engines, models)
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
        """Counters from a page of Prometheus text."""
        lines = [line for line in page.splitlines() if line.split(" ")[0].split("{")[0] in _WANTED]
        wanted = "".join(line + "\n" for line in lines)
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                key = sample.name, sample.labels.get(_WANTED[sample.name], "")
                values[key] = values.get(key, 0.0) + sample.value
        return cls(values)

    def since(self, before: Counters) -> Counters:
        """How much each counter grew since `before`."""
        return Counters({k: v - before.values.get(k, 0.0) for k, v in self.values.items()})

    def get(self, name: str) -> float:
        """Value of a metric without a label of its own; 0 if the server lacks it."""
        return self.values.get((name, ""), 0.0)

    def labelled(self, name: str) -> dict[str, float]:
        """Values of a metric by its label."""
        return {label: v for (n, label), v in self.values.items() if n == name and label}

    def by(self, name: str) -> dict[int, float]:
        """Values of a metric by number: position, or K."""
        return dict(sorted((int(label), v) for label, v in self.labelled(name).items()))


def speculation(grown: Counters) -> dict[str, Any]:
    """Acceptance, K and the server's own speed-up from what its counters grew by.

    `acceptance_length` is tokens per drafted step, 1 + accepted / drafts, and `acceptance` by
    position is over drafted steps too: its sum is the length less 1, and servers compare whether
    they verify all drafts or not. Over the drafts verified there: the gateway's own metrics.
    `k_mean` is over all steps, those without drafts included, where they are known. `control` is
    what probes lost and the policy took, over the seconds of all steps that made tokens.
    """
    found: dict[str, Any] = {}
    drafts, drafted = grown.get(f"{_VLLM}drafts_total"), grown.get(f"{_VLLM}draft_tokens_total")
    if drafts:
        length = 1 + grown.get(f"{_VLLM}accepted_tokens_total") / drafts
        found |= {"acceptance_length": round(length, 4), "k_mean": round(drafted / drafts, 3)}
        accepted = grown.by(f"{_VLLM}accepted_tokens_per_pos_total")
        found["acceptance"] = [round(value / drafts, 4) for value in accepted.values()]
    steps = grown.by("aerie_steps_total")
    if total := sum(steps.values()):
        found["k_mean"] = round(sum(k * count for k, count in steps.items()) / total, 3)
        found["steps"] = {str(k): int(count) for k, count in steps.items() if count}
        if drafts:  # the server may have drafted further positions before
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
