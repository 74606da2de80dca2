"""The parts of the check, the most valuable ones first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu"]
DEVICES: tuple[Device, ...] = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check: a process of its own, with a time limit and a file of results."""

    name: str
    body: str  # module of this package and its function, which gets a PartReport
    purpose: str
    limit_s: float  # after which it is ended
    least_s: float  # if less is left of the time for all parts, it is not begun
    by_default: bool = True  # else it runs only where it is named


# An engine with 36 layers starts in 95 s on an H200, a first one in two minutes. What a part needs
# at least is what it took there (drafts-p-eagle 150 s, steps-p-eagle 143 s), and a little more.
# fmt: off
PARTS = (
    Part("smoke", "smoke:run", "an operation of vLLM, an engine in eager mode, one with graphs",
         240, 20),
    Part("kernels", "pytest_part:kernels", "our kernels against their references", 150, 20),
    Part("drafts-p-eagle", "drafts:p_eagle", "P-EAGLE drafts against the torch module", 240, 160),
    Part("adaptive", "adaptive:run", "adaptive K while the load changes", 270, 190),
    Part("steps-p-eagle", "device_times:p_eagle", "step times of our P-EAGLE", 240, 150),
    Part("drafts-eagle3", "drafts:eagle3", "EAGLE-3 drafts against the torch module", 240, 160),
    Part("mixture", "device_times:mixture", "a mixture of experts with a head", 240, 60),
    Part("steps-vllm", "device_times:vllm", "step times of vLLM, with its EAGLE-3 and without",
         420, 150),
    Part("steps-eagle3", "device_times:eagle3", "step times of our EAGLE-3", 240, 150),
    Part("kernel-times", "device_times:kernels", "kernels beside copies of as many bytes",
         900, 60, by_default=False),
    Part("drafts-float32", "pytest_part:drafts_in_float32", "drafts with another K at every step",
         900, 60, by_default=False),
    Part("sweep", "device_times:sweep", "methods against load, served over HTTP",
         7200, 300, by_default=False),
)
# fmt: on


def chosen(names: str) -> Sequence[Part]:
    """The parts of a list such as `smoke,kernels`, in their own order; by default those that a
    check has. Raises ValueError for an unknown name."""
    if not names:
        return [part for part in PARTS if part.by_default]
    asked = {name.strip() for name in names.split(",")}
    if unknown := sorted(asked - {part.name for part in PARTS}):
        known = ", ".join(part.name for part in PARTS)
        raise ValueError(f"no part {unknown[0]!r}: {known}")
    return [part for part in PARTS if part.name in asked]
