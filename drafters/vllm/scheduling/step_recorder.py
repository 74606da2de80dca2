"""The record of a scheduler's steps, from which the policy learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus

from drafters.config import HEAD
from drafters.control.policy import (
    Load,
    Policy,
    SourceCounts,
    Span,
    Step,
    count_draft_limits,
    counts_above,
)
from drafters.vllm.scheduling.step_output import WorkerStepOutput

RECENT = 64  # steps that are remembered for calibration


class _Cut(NamedTuple):
    """A request's drafts, of which a grammar left the first ones."""

    drafts: int
    kept: int


class _Begun(NamedTuple):
    """A step that is scheduled and has not ended."""

    at: float
    load: Load
    cut: dict[str, _Cut]  # by request
    sources: Mapping[str, str]  # of drafts that are not the head's, by request


class _Ended(NamedTuple):
    """A step that has ended."""

    step: Step
    verified: list[tuple[str, int, int]]  # request, its drafts that were verified, those accepted
    cut: dict[str, _Cut]  # by request
    sources: Mapping[str, str]


class StepRecorder:
    """Times steps from `begin` to `end`, by SchedulerOutput, and counts their drafts.

    On a GPU, the V2 runner gives a step's tokens while the device still drafts. The seconds of its
    drafter come with the next step's output, and have passed between the two. So a step waits for
    that output, and its seconds are those between outputs, without the drafter of the step before,
    and with its own.

    Drafts are counted in `tell`, which can run while the workers do. `end` cannot: its time would
    be added to every step.

    Where scheduling is synchronous, vLLM cuts drafts that a request's grammar forbids before the
    target verifies the rest. The target would reject the first forbidden one with certainty. So the
    drafts of such a request count as many as were made: counting only the rest would make the
    acceptance of what is left that of all.
    """

    def __init__(self, k_max: int, most: int | None = None, drafter: str = HEAD) -> None:
        """`k_max` is the head's largest K, `most` the most draft tokens of any source. `drafter` is
        the source of which K is chosen: vLLM's own lookup, where it is no head."""
        self._drafter = drafter
        self.recent: deque[Step] = deque(maxlen=RECENT)
        self._k_max = k_max
        self._most = most or k_max
        self._begun: dict[int, _Begun] = {}
        self._untold: deque[_Ended] = deque()
        self._drafting: _Ended | None = None  # whose drafter's seconds are not known
        self._verified: list[tuple[str, int, int]] = []
        self._sources: Mapping[str, str] = {}  # of the drafts of the step that ends next
        self._cut: dict[str, _Cut] = {}  # by request, of drafts that are not scheduled yet
        self._cut_from_step: dict[str, _Cut] = {}  # by request, of the step that begins next
        self._ended = self._control = 0.0

    @property
    def untold(self) -> int:
        """Number of ended steps that the policy has not been told of."""
        return len(self._untold)

    @contextmanager
    def controlling(self) -> Iterator[None]:
        """Count the time inside as `control_seconds` of the next step that ends."""
        began = perf_counter()
        yield
        self._control += perf_counter() - began

    def drafted(self, made: Any, requests: Mapping[str, Any]) -> None:
        """Note the drafts that a grammar cut: `made` is the DraftTokenIds before, and `requests`,
        the scheduler's, have what is left for the next step."""
        for name, tokens in zip(made.req_ids, made.draft_token_ids, strict=True):
            request = requests.get(name)
            if request is None or not request.use_structured_output or request.is_prefill_chunk:
                continue
            kept = len(request.spec_token_ids)
            if kept < len(tokens):
                self._cut[name] = _Cut(len(tokens), kept)

    def replaced(self, request: str) -> None:
        """Note that other drafts have taken the place of a request's, which count for nothing."""
        self._cut.pop(request, None)

    def cut_from(self, scheduled: Any, requests: Mapping[str, Any]) -> int:
        """Number of draft tokens that a step which is being scheduled lacks for having been cut.
        What was cut of a request that the step leaves out waits with the rest of its drafts.
        Forgets requests whose drafts are gone, or were shortened further."""
        left = scheduled.scheduled_spec_decode_tokens
        cuts, self._cut, self._cut_from_step = self._cut, {}, {}
        for name, cut in cuts.items():
            if name not in scheduled.num_scheduled_tokens:
                if keeps_drafts(requests.get(name)):
                    self._cut[name] = cut
            elif len(left.get(name, ())) == cut.kept:
                self._cut_from_step[name] = cut
        return sum(cut.drafts - cut.kept for cut in self._cut_from_step.values())

    def begin(
        self, scheduled: Any, at: float, load: Load, sources: Mapping[str, str] | None = None
    ) -> None:
        """Record a scheduled step; its scheduling began at `at`, by `perf_counter`. `sources` are
        those of its requests' drafts, where they are not the head's."""
        self._begun[id(scheduled)] = _Begun(at, load, self._cut_from_step, sources or {})

    def ends_next(self, scheduled: Any) -> None:
        """Say which step `verified` is called for. With pipeline stages it is not the one that
        began last."""
        begun = self._begun.get(id(scheduled))
        self._sources = {} if begun is None else begun.sources

    def verified(self, request: str, drafts: int, accepted: int) -> str:
        """Count a request's drafts in the step that ends next; returns their source."""
        self._verified.append((request, drafts, accepted))
        return self._sources.get(request, self._drafter)

    def end(self, scheduled: Any, output: Any, spans: tuple[Span, ...] = ()) -> None:
        """Record a finished step, with the output from which vLLM has cut surplus tokens, and the
        forced spans that its tokens were compared with."""
        begun = self._begun.pop(id(scheduled), None)
        if begun is None:
            return
        ended, extras = perf_counter(), WorkerStepOutput.of(output)
        # An asynchronous step is scheduled while the one before runs.
        started = max(begun.at, self._ended)
        step = Step(
            load=begun.load,
            k=scheduled.num_spec_tokens_to_schedule if extras.head_k is None else extras.head_k,
            seconds=ended - started,
            tokens=sum(map(len, output.sampled_token_ids)),
            drafted=(),
            accepted=(),
            control_seconds=self._control,
            looked_up=len(extras.looked_up),
            matches=extras.matches,
            missed_tokens_read=extras.missed_tokens_read,
            spans=spans,
        )
        target_s, draft_s = extras.target_seconds, extras.draft_seconds
        if extras.of_step_before:
            if self._drafting is not None:
                self._untold.append(_with_seconds(self._drafting, target_s, draft_s, draft_s))
                in_this_step = max(0.0, draft_s - (started - self._ended))
                # Host and device have clocks of their own: never 0.
                step = step._replace(seconds=max(1e-6, step.seconds - in_this_step))
            self._drafting = _Ended(step, self._verified, begun.cut, begun.sources)
        else:
            record = _Ended(step, self._verified, begun.cut, begun.sources)
            self._untold.append(_with_seconds(record, target_s, draft_s))
        self._ended = ended
        self._verified = []
        self._control = perf_counter() - ended  # is part of the next step

    def tell(self, policy: Policy) -> None:
        """Let the policy observe every step that it has not been told of."""
        while self._untold:
            step = self._counted(self._untold.popleft())
            self.recent.append(step)
            policy.observe(step)

    def _counted(self, ended: _Ended) -> Step:
        """A step with the counts of its drafts, by source."""
        _, verified, cut, sources = ended
        counts = {self._drafter: ([0] * (self._k_max + 1), [0] * (self._k_max + 1))}
        for source in dict.fromkeys(sources.values()):
            counts[source] = [0] * (self._most + 1), [0] * (self._most + 1)
        for name, drafts, right in verified:
            drafted, accepted = counts[sources.get(name, self._drafter)]
            drafted[cut[name].drafts if name in cut else drafts] += 1
            accepted[right] += 1
        for name, (made, kept) in cut.items():
            if not kept:  # nothing was left to verify
                counts[sources.get(name, self._drafter)][0][made] += 1
        by_position = {
            source: (counts_above(drafted), counts_above(accepted))
            for source, (drafted, accepted) in counts.items()
        }
        drafted_by_head, accepted_of_head = by_position.pop(self._drafter)
        others = tuple(SourceCounts(source, *found) for source, found in by_position.items())
        return ended.step._replace(
            drafted=drafted_by_head, accepted=accepted_of_head, others=others
        )


def _with_seconds(ended: _Ended, target: float, draft: float, extra: float = 0.0) -> _Ended:
    """A step with the seconds of its parts; `extra` seconds had not passed when it ended."""
    step = ended.step
    return ended._replace(
        step=step._replace(target_seconds=target, draft_seconds=draft, seconds=step.seconds + extra)
    )


def keeps_drafts(request: Any) -> bool:
    """Whether a request that a step leaves out keeps its drafts: not if it has ended (None) or was
    preempted."""
    return request is not None and request.status == RequestStatus.RUNNING


def load_of(
    scheduled: Any, requests: Mapping[str, Any], limits: Mapping[str, int],
    k_max: int, cut: int = 0, padded: bool = False,
) -> Load:  # fmt: skip
    """The Load of a SchedulerOutput, before vLLM counts its tokens as computed. `limits` has the
    requests that may have fewer than `k_max` drafts, `cut` is how many draft tokens grammars cut.
    `padded`: requests have K drafts whatever their limit, those beyond it to no purpose.
    """
    decoding, context = [], 0
    for name, tokens in scheduled.num_scheduled_tokens.items():
        request = requests[name]
        end = request.num_computed_tokens + tokens
        context += end
        if end >= request.num_tokens:
            decoding.append(name)
    drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    by_limit: tuple[int, ...] = ()
    if not limits.keys().isdisjoint(decoding):
        by_limit = count_draft_limits([limits.get(name, k_max) for name in decoding], k_max)
    return Load(
        requests=len(decoding),
        prefill_tokens=scheduled.total_num_scheduled_tokens - drafts - len(decoding),
        context_tokens=context,
        draft_tokens=drafts + cut,
        cut_tokens=cut,
        requests_by_draft_limit=by_limit,
        padded=padded,
        drafts_off=all(limits.get(name) == 0 for name in scheduled.num_scheduled_tokens),
    )
