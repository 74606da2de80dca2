"""Usage of the engine by one HTTP request: its limits, sequences, tokens, times.

The gateway sets the usage of a request's task. GatewayLLM, further down in the same task or in one
made by it, reads the request's priority and largest K from it and enters every sequence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

# Of an answer's JSON, about.
BYTES_OF_ALTERNATIVE = 60
BYTES_OF_TOKEN = 7  # of a token id or, where a prompt is echoed, of its text

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
class _Totals:
    """Sums over sequences, and the statistics of the one that began first."""

    output_tokens: int = 0
    cached_tokens: int | None = None  # of prompts; None without a sequence
    drafts: Drafts | None = None
    first: Any = None
    last_token_ts: float = 0.0

    def add(self, sequence: Any) -> None:
        stats, counts = sequence.stats, sequence.spec_decode_metrics
        if sequence.request_index == 0:
            self.cached_tokens = (self.cached_tokens or 0) + sequence.num_cached_tokens
        # What a step with drafts made behind a stop string is not among them, as in the answer's
        # usage; `stats.num_generation_tokens` has it.
        self.output_tokens += sequence.detokenizer.num_output_tokens()
        if stats is not None and stats.first_token_ts > 0:
            if self.first is None or stats.first_token_ts < self.first.first_token_ts:
                self.first = stats
            self.last_token_ts = max(self.last_token_ts, stats.last_token_ts)
        if counts is not None:
            before = self.drafts or Drafts(0, 0, 0)
            self.drafts = Drafts(
                before.steps + sum(counts.histogram),
                before.drafted + counts.num_draft_tokens,
                before.accepted + sum(j * n for j, n in enumerate(counts.histogram)),
            )


@dataclass
class RequestUsage:
    """What one request may use of the engine, and what it has used.

    `cache_tenant` names whose entries of the prefix cache it may use (None: all share them).
    `captured_as` is the tenant as which its sequences are captured (None: they are not), and
    `followed` are those that will be, when they end.
    `max_alternatives` is how many log probabilities it may ask for (None: any number), and
    `alternatives` how many its prompts ask for.
    `repeats_prompts` says whether each choice of the answer holds its prompt again, and
    `returns_token_ids` whether the answer holds the ids of its tokens. `echoed_bytes` is how many
    bytes of the body the answer repeats, about.
    `sequences` are vLLM's RequestState objects, which have their counts and times while they run.
    """

    priority: int = 0
    max_k: int | None = None
    cache_tenant: str | None = None
    captured_as: str | None = None
    max_alternatives: int | None = None
    alternatives: int = field(default=0, init=False)
    repeats_prompts: bool = field(default=False, init=False)
    returns_token_ids: bool = field(default=False, init=False)
    echoed_bytes: int = field(default=0, init=False)
    repeated_tokens: int = field(default=0, init=False)  # of prompts, in all choices together
    # The most log probabilities that any prompt asks for at one token.
    output_width: int = field(default=0, init=False)
    prompt_width: int = field(default=0, init=False)
    sequences: list[Any] = field(default_factory=list, init=False)
    followed: list[Any] = field(default_factory=list, init=False)
    charged: int = 0  # tokens, as estimated before the work began
    # Tokens that were tokenised or detokenised for the client; None where that was not asked for.
    tokenized: int | None = None
    # Of all prompts. The copies of `n` share one, and so do the sequences of a beam search.
    prompt_tokens: int = field(default=0, init=False)
    _ended: _Totals = field(default_factory=_Totals, init=False)
    _unfinished: Container[str] = field(default=(), init=False)

    def enter(self, sequence: Any, unfinished: Container[str]) -> None:
        """Count a sequence from now on, and its prompt. `unfinished` has the ids of the sequences
        that the engine has not finished, now and later."""
        self._unfinished = unfinished
        beams = _beam_search.get()
        if sequence.request_index == 0 and not (beams is not None and beams.entered):
            self.prompt_tokens += sequence.prompt_len
        if beams is not None:
            beams.entered = True
        self.sequences.append(sequence)

    def end(self, request_id: str) -> None:
        """Keep the counts of vLLM's request of this id, which has ended, and drop its sequences.

        A beam search makes thousands of such requests, each with a prompt of its own.
        """
        running = []
        for sequence in self.sequences:
            if sequence.external_req_id == request_id:
                self._ended.add(sequence)
            else:
                running.append(sequence)
        self.sequences = running

    def end_followed(self, request_id: str) -> list[Any]:
        """The followed sequences of vLLM's request of this id, which has ended; each once.

        They outlast the response, which may end before vLLM has aborted its request.
        """
        ended = [each for each in self.followed if each.external_req_id == request_id]
        self.followed = [each for each in self.followed if each.external_req_id != request_id]
        return ended

    def count_alternatives(
        self,
        *,
        output_tokens: int = 0,
        output_width: int = 0,
        prompt_tokens: int = 0,
        prompt_width: int = 0,
    ) -> None:
        """Count the log probabilities that one prompt asks for: so many (`output_width`) at each
        output token of its choices, and so many at each of its own tokens, which every choice may
        repeat."""
        self.alternatives += output_tokens * output_width + prompt_tokens * prompt_width
        self.output_width = max(self.output_width, output_width)
        self.prompt_width = max(self.prompt_width, prompt_width)

    @property
    def asks_for_too_many(self) -> bool:
        """Whether more log probabilities are asked for than the request may have."""
        return self.max_alternatives is not None and self.alternatives > self.max_alternatives

    @property
    def alternatives_bytes(self) -> int:
        """About how many bytes the log probabilities of the tokens have that there are so far."""
        if not self.alternatives:
            return 0
        most = self.output_tokens * self.output_width + self.prompt_tokens * self.prompt_width
        return min(self.alternatives, most) * BYTES_OF_ALTERNATIVE

    @property
    def repeats_too_much(self) -> bool:
        """Whether the answer would repeat more tokens of prompts than a request may have log
        probabilities."""
        return self.max_alternatives is not None and self.repeated_tokens > self.max_alternatives

    @property
    def answer_bytes(self) -> int:
        """About how many bytes the answer has so far, beside its text."""
        tokens = self.repeated_tokens
        if self.returns_token_ids:
            tokens += self.output_tokens + self.prompt_tokens
        return self.alternatives_bytes + self.echoed_bytes + tokens * BYTES_OF_TOKEN

    @property
    def begun(self) -> bool:
        """Whether the engine has produced a token."""
        return self._totals.first is not None

    @property
    def in_engine(self) -> tuple[int, int]:
        """How many sequences the engine has of it: those with a token, and those without.

        Fewer than it had slots for: of `n` choices some may have ended, and an answer whose reader
        is slow may have ended as a whole.
        """
        begun = [
            sequence.stats is not None and sequence.stats.first_token_ts > 0
            for sequence in self.sequences
            if sequence.request_id in self._unfinished
        ]
        return sum(begun), len(begun) - sum(begun)

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated so far."""
        return self._totals.output_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that were in the prefix cache; None before a sequence was entered.
        Of the copies of `n` the first counts: it leaves its own blocks for the others."""
        return self._totals.cached_tokens

    @property
    def drafts(self) -> Drafts | None:
        """Draft tokens of all sequences; None where the engine does not report any.

        The engine reports them at a sequence's end, and at each step where a stop string may end
        it.
        """
        return self._totals.drafts

    @property
    def timing(self) -> Timing | None:
        """Times in the engine; None before the first token."""
        totals = self._totals
        if (first := totals.first) is None:
            return None
        return Timing(
            max(0.0, first.scheduled_ts - first.queued_ts),
            max(0.0, first.first_token_ts - first.scheduled_ts),
            max(0.0, totals.last_token_ts - first.first_token_ts),
        )

    @property
    def _totals(self) -> _Totals:
        totals = replace(self._ended)
        for sequence in self.sequences:
            totals.add(sequence)
        return totals


@dataclass
class _BeamSearch:
    entered: bool = False  # whether its first sequence, which is its prompt, was entered


_beam_search: ContextVar[_BeamSearch | None] = ContextVar("beam_search", default=None)


def searches_with_beams() -> bool:
    """Whether the current request is a beam search."""
    return _beam_search.get() is not None


def begin_beam_search() -> None:
    """Count one prompt for all sequences of the current task and the tasks that it creates.

    vLLM sends each beam to the engine again at every step, as a prompt that has grown by a token.
    """
    _beam_search.set(_BeamSearch())


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


def current_answer_bytes() -> int:
    """About how many bytes the current request's answer has so far, beside its text."""
    usage = current_usage()
    return 0 if usage is None else usage.answer_bytes
