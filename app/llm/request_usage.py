"""Usage of the engine by one HTTP request: its limits, sequences, tokens, times.

The gateway sets the usage of a request's task. GatewayLLM, further down in the same task or in one
made by it, reads the request's priority and largest K from it and enters every sequence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

R = TypeVar("R")
A = TypeVar("A")


@dataclass(frozen=True)
class Timing:
    """Seconds of a request's life in the engine, of the sequence that began first."""

    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of a request, over all steps that verified any."""

    steps: int
    drafted: int
    accepted: int

    @property
    def k(self) -> float:
        """Draft tokens per step."""
        return self.drafted / self.steps

    @property
    def length(self) -> float:
        """Acceptance length: tokens per step, the target's own included."""
        return 1 + self.accepted / self.steps


@dataclass
class RequestUsage:
    """What one request may use of the engine, and what it has used.

    `cache_tenant` names whose entries of the prefix cache it may use (None: all share them).
    `sequences` are vLLM's RequestState objects, which have their counts and times while they run
    and after they have ended, in whatever way.
    """

    priority: int = 0
    max_k: int | None = None
    cache_tenant: str | None = None
    sequences: list[Any] = field(default_factory=list)
    charged: int = 0  # tokens, as estimated before the work began
    # Tokens that were tokenised or detokenised for the client; None where that was not asked for.
    tokenized: int | None = None

    @property
    def begun(self) -> bool:
        """Whether the engine has produced a token."""
        return any(_begun(sequence) for sequence in self.sequences)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts. The copies of `n` share one."""
        return sum(s.prompt_len for s in self.sequences if s.request_index == 0)

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated so far."""
        return sum(s.stats.num_generation_tokens for s in self.sequences if s.stats is not None)

    @property
    def drafts(self) -> Drafts | None:
        """Draft tokens of all sequences; None where the engine does not report any.

        The engine reports them at a sequence's end, and at each step where a stop string may end
        it.
        """
        counts = [
            s.spec_decode_metrics for s in self.sequences if s.spec_decode_metrics is not None
        ]
        if not counts:
            return None
        return Drafts(
            steps=sum(sum(count.histogram) for count in counts),
            drafted=sum(count.num_draft_tokens for count in counts),
            accepted=sum(j * n for count in counts for j, n in enumerate(count.histogram)),
        )

    @property
    def timing(self) -> Timing | None:
        """Times in the engine; None before the first token."""
        begun = [s.stats for s in self.sequences if _begun(s)]
        if not begun:
            return None
        first = min(begun, key=lambda stats: stats.first_token_ts)
        return Timing(
            max(0.0, first.scheduled_ts - first.queued_ts),
            max(0.0, first.first_token_ts - first.scheduled_ts),
            max(0.0, max(stats.last_token_ts for stats in begun) - first.first_token_ts),
        )


def _begun(sequence: Any) -> bool:
    return sequence.stats is not None and sequence.stats.first_token_ts > 0


_current: ContextVar[RequestUsage | None] = ContextVar("usage", default=None)


# W3C trace context that the engine's span of this task's request belongs under.
_trace: ContextVar[Mapping[str, str] | None] = ContextVar("trace", default=None)


def set_trace_headers(headers: Mapping[str, str]) -> None:
    """Set the trace context of the current task and the tasks that it creates."""
    _trace.set(headers)


def trace_headers() -> Mapping[str, str] | None:
    """The current task's trace context; None while tracing is off."""
    return _trace.get()


def set_current_usage(usage: RequestUsage) -> None:
    """Set the usage of the current task and the tasks that it creates."""
    _current.set(usage)


def count_tokenized(
    call: Callable[[R], Awaitable[A]], tokens: Callable[[R, A], int | None]
) -> Callable[[R], Awaitable[A]]:
    """Wrap `call` so that the request's usage counts the `tokens` that it worked on.

    While it runs, and if it ends without an answer, the charged tokens count: the work has been
    done.
    """

    async def call_and_count(request: R) -> A:
        usage = current_usage()
        if usage is not None:
            usage.tokenized = usage.charged
        answer = await call(request)
        if usage is not None and (count := tokens(request, answer)) is not None:
            usage.tokenized = count
        return answer

    return call_and_count


def current_usage() -> RequestUsage | None:
    """The usage of the request that the current task serves; None outside of one."""
    return _current.get()
