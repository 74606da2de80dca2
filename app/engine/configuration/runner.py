"""The ways to start an engine, in the order in which they are tried. Pure: no vllm import.

docs/decisions/0025-start-paths.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.errors import StartupError
from app.settings import Settings
from drafters.config import GRAMMAR, LOOKUP

V2 = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own variable (vllm/envs.py)


class StartPath(StrEnum):
    """A way to start the engine: its model runner, whether it compiles, whether it drafts."""

    V2 = "v2"
    V1 = "v1"
    V1_EAGER = "v1-eager"  # neither compiled nor captured in CUDA graphs
    NO_DRAFTS = "no-drafts"  # K = 0, without head and lookup

    @property
    def description(self) -> str:
        """What runs on this path, for a log line."""
        return _DESCRIPTIONS[self]

    def settings(self, asked: Settings) -> Settings:
        """The settings of an engine on this path, where `asked` are the operator's."""
        if self is StartPath.V1_EAGER:
            engine = asked.engine.model_copy(update={"enforce_eager": True})
            return asked.model_copy(update={"engine": engine})
        if self is StartPath.NO_DRAFTS:
            speculation = asked.speculation.model_copy(update={"k": 0})
            others = {**asked.engine.engine_args}
            others.pop("speculative_config", None)
            engine = asked.engine.model_copy(update={"engine_args": others})
            return asked.model_copy(update={"speculation": speculation, "engine": engine})
        return asked

    def absent_sources(self, asked: Settings) -> tuple[str, ...]:
        """The sources of drafts that this path lacks and V1 has, for the operator's settings.

        V2 schedules a step while the newest tokens are on the device alone: nothing is looked up
        beside a head there, and no text that a grammar forces is drafted. Without a head vLLM's own
        lookup runs on the device."""
        if self is not StartPath.V2 or not asked.speculates:
            return ()
        return (LOOKUP, GRAMMAR) if asked.has_head else (GRAMMAR,)

    def runner(self, wish: bool | None) -> str | None:
        """The value of vLLM's variable on this path; None leaves it unset, and the choice to vLLM.

        `wish` is what the operator set it to (`runner_wish`). Without a head their wish holds.
        """
        if self is StartPath.NO_DRAFTS:
            return None if wish is None else str(int(wish))
        return "1" if self is StartPath.V2 else "0"


_DESCRIPTIONS = {
    StartPath.V2: "vLLM's V2 model runner",
    StartPath.V1: "vLLM's V1 model runner",
    StartPath.V1_EAGER: "vLLM's V1 model runner without compilation",
    StartPath.NO_DRAFTS: "no drafts",
}


class Blame(StrEnum):
    """What a failed start is put down to, which decides what may work instead."""

    TARGET = "target"  # the model, the options or the machine: no path works
    UNSUPPORTED = "unsupported"  # the runner says before anything is loaded that it cannot
    HEAD = "head"  # the head's checkpoint: only serving without it works
    DRAFTS = "drafts"  # code that drafts or verifies, or the memory that a head takes
    RUNNER = "runner"  # anything else after the target was loaded


@dataclass(frozen=True)
class StartPlan:
    """The paths that a first start tries, one after another.

    `wished` is whether the operator chose the runner, `strict` whether a path that fails is the
    end, `has_head` whether drafts were asked for: without a head they are an offer, which options
    that they do not work with withdraw.
    """

    paths: tuple[StartPath, ...]
    wished: bool = False
    strict: bool = False
    has_head: bool = True

    @property
    def first(self) -> StartPath:
        """The path that is tried first."""
        return self.paths[0]

    def after(self, failed: StartPath, blame: Blame) -> StartPath | None:
        """The next path that can work where `failed` did not; None if there is none."""
        rest = self.paths[self.paths.index(failed) + 1 :]
        if blame is Blame.UNSUPPORTED and not self.wished and StartPath.V1 in rest:
            return StartPath.V1  # nothing failed: that runner is the one for this configuration
        if self.strict or blame is Blame.TARGET:
            return None
        if not self.has_head:
            # V1 with compilation is for what V2 refuses; other failures leave the drafts out first.
            rest = tuple(path for path in rest if path is not StartPath.V1)
            return rest[0] if rest else None
        if blame is not Blame.UNSUPPORTED and StartPath.V1_EAGER in rest:
            # What broke may be compilation or a graph's capture: do without both.
            rest = tuple(path for path in rest if path is not StartPath.V1)
        if blame is Blame.DRAFTS:
            # Nothing is wrong with the target's graphs, which are worth more than drafts.
            rest = tuple(path for path in rest if path is not StartPath.V1_EAGER)
        if blame is Blame.HEAD:
            rest = tuple(path for path in rest if path is StartPath.NO_DRAFTS)
        if blame in (Blame.RUNNER, Blame.UNSUPPORTED):
            rest = tuple(path for path in rest if path is not StartPath.NO_DRAFTS)
        return rest[0] if rest else None


def start_plan(settings: Settings, *, on_cpu: bool, wish: bool | None) -> StartPlan:
    """The plan of a first start.

    On a GPU V2 comes first, then V1 without compilation or no drafts, by what broke; V1 with
    compilation is for what V2 says it cannot run. On a CPU V1 is the only one, and without a head
    no drafts come next. On a GPU without a head no drafts come before V1 without compilation, which
    is slower than they are: it is for a machine on which nothing compiles. `wish` puts the runner
    that it names first.
    """
    v2, v1, eager, no_drafts = StartPath
    if not settings.speculates:
        paths: tuple[StartPath, ...] = (no_drafts,)
    elif on_cpu:
        paths = (v1,) if settings.has_head else (v1, no_drafts)
        paths = (v2, v1, no_drafts) if wish else paths
    else:
        last = (eager, no_drafts) if settings.has_head else (no_drafts, eager)
        paths = (v1, *last) if wish is False else (v2, v1, *last)
    return StartPlan(
        paths,
        wished=wish is not None,
        strict=settings.speculation.strict_speculation,
        has_head=settings.has_head,
    )


def runner_wish(environ: Mapping[str, str]) -> bool | None:
    """Whether the environment asks for V2 (True) or V1 (False); None if it says nothing.

    Raises StartupError for a value that vLLM cannot read.
    """
    text = environ.get(V2)
    if text is None:
        return None
    if text.strip() not in ("0", "1"):
        raise StartupError(f"{V2}={text}: give 1 or 0, or unset it")
    return text.strip() == "1"
