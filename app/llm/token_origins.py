"""Token origins: which tokens of an answer were drafted, and which the target chose itself.

The engine core reports with each output how many draft tokens of a sequence have been verified so
far, by source, and how many accepted (drafters/vllm/scheduling/source_counts.py). What a step adds
to these counts is the origin of its tokens: the accepted drafts come first, and the target's own
token ends the step.

A token's text is what it added to the answer, as vLLM's detokenizer says. It is handed out once the
text that the client has been sent reaches to its end: text that might still turn out to be a stop
string is held back, and its tokens with it. No vllm import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drafters.config import GRAMMAR, HEAD, LOOKUP, SOURCES

# Source of a draft token -> its `origin` in an answer.
ORIGINS = {HEAD: "draft", LOOKUP: "lookup", GRAMMAR: "grammar"}
_ATTRIBUTE = "aerie_token_log"  # on vLLM's RequestState of a sequence that is watched


@dataclass(frozen=True)
class SequenceStep:
    """Draft tokens of one sequence in one engine step, which have one source. `verified`: whether
    it had any."""

    drafted: int = 0
    accepted: int = 0
    verified: bool = False
    source: str = HEAD  # one of SOURCES

    def entry(self) -> dict[str, Any]:
        """The step as it is sent to the client."""
        counts = {"drafted": self.drafted, "accepted": self.accepted}
        return {**counts, "source": self.source} if self.drafted else counts


class TokenLog:
    """Steps and tokens of one sequence, and how far they have been handed out."""

    def __init__(self) -> None:
        self.steps: list[SequenceStep] = []
        self._counted = SequenceStep()  # sums of all steps so far
        self._verify_steps = 0
        self._drafted_by_source = [0] * len(SOURCES)  # sums of all steps so far
        self._origins: list[tuple[int, int]] = []  # of each token: its step, its place in the step
        self._texts: list[str] = []
        self._tokens_sent = self._characters_sent = 0  # as outputs
        self._tokens_reported = self._characters_reported = self._steps_reported = 0  # as origins

    def add_text(self, text: str) -> str:
        """Log the text that the next token added to the answer; returns it."""
        self._texts.append(text)
        return text

    def add_step(self, tokens: int, counts: Any = None) -> None:
        """Log a step that produced `tokens` tokens.

        `counts` are vLLM's RequestSpecDecodeMetrics of all steps so far, None if nothing has been
        verified yet.
        """
        step = SequenceStep()
        if counts is not None:
            accepted = sum(j * steps for j, steps in enumerate(counts.histogram))
            verify_steps = sum(counts.histogram)
            step = SequenceStep(
                counts.num_draft_tokens - self._counted.drafted,
                accepted - self._counted.accepted,
                verify_steps > self._verify_steps,
                self._source_of(counts.per_step_drafted),
            )
            self._counted = SequenceStep(counts.num_draft_tokens, accepted)
            self._verify_steps = verify_steps
        if not tokens and not step.verified:
            return
        self._origins += [(len(self.steps), place) for place in range(tokens)]
        self.steps.append(step)

    def _source_of(self, drafted_by_source: Iterable[int]) -> str:
        """The source of the drafts that a step adds to these sums; the head if they are not known,
        as from an engine with one source."""
        before = self._drafted_by_source
        self._drafted_by_source = list(drafted_by_source) or before
        counts = zip(SOURCES, before, self._drafted_by_source, strict=True)
        return next((source for source, old, new in counts if new > old), HEAD)

    def take(self, tokens: int, text: str, *, finished: bool) -> dict[str, Any]:
        """Origins to send along with an output of `tokens` tokens and this text.

        Returns {"tokens": [...], "steps": [...]}, without those that were returned before. The
        texts of all tokens together are a beginning of the answer, and all of it once it is
        `finished`.
        """
        self._tokens_sent += tokens
        self._characters_sent += len(text)
        reported: list[dict[str, Any]] = []
        while self._tokens_reported < self._tokens_sent:
            index = self._tokens_reported
            # The token that ends a turn has no text: it is not detokenised.
            added = self._texts[index] if index < len(self._texts) else ""
            room = self._characters_sent - self._characters_reported
            if len(added) > room:
                if not finished:
                    break
                added = added[:room]  # the rest belongs to a stop string
            self._tokens_reported += 1
            self._characters_reported += len(added)
            reported.append(self._token(added, *self._origins[index]))
        begun = len(self.steps) if finished else (reported[-1]["step"] + 1 if reported else 0)
        steps = self.steps[self._steps_reported : begun]
        self._steps_reported = max(self._steps_reported, begun)
        return {
            "tokens": reported,
            "steps": [step.entry() for step in steps],
        }

    def _token(self, text: str, step: int, place: int) -> dict[str, Any]:
        token: dict[str, Any] = {"text": text, "step": step}
        if place < self.steps[step].accepted:
            return token | {"origin": ORIGINS[self.steps[step].source], "position": place + 1}
        return token | {"origin": "target"}

    @property
    def verify_steps(self) -> list[SequenceStep]:
        """Steps that verified drafts: what vLLM's `per_step_*` lists are made of."""
        return [step for step in self.steps if step.verified]


def watch(sequence: Any) -> None:
    """Start a log for a RequestState of vLLM (vllm/v1/engine/output_processor.py)."""
    log = TokenLog()
    setattr(sequence, _ATTRIBUTE, log)
    decode = getattr(sequence.detokenizer, "decode_next", None)
    if decode is not None:  # without a tokenizer no token has a text
        sequence.detokenizer.decode_next = lambda token: log.add_text(decode(token))


def log_of(sequence: Any) -> TokenLog | None:
    """The log of a sequence; None if it is not watched."""
    return getattr(sequence, _ATTRIBUTE, None)


def record(outputs: Iterable[Any], sequences: Mapping[str, Any]) -> None:
    """Log the engine core's outputs of one step, for those `sequences` that are watched.

    Called before vLLM processes the outputs.
    """
    for output in outputs:
        log = log_of(sequences.get(output.request_id))
        if log is not None:
            log.add_step(len(output.new_token_ids), output.spec_decode_metrics)


def attach(output: Any, sequences: Iterable[Any]) -> None:
    """Attach the origins of its tokens to each choice of a RequestOutput of vLLM, as `speculation`.

    The counts of a choice that has ended also get those of its steps.
    """
    logs = {
        sequence.request_index: log
        for sequence in sequences
        if sequence.external_req_id == output.request_id and (log := log_of(sequence)) is not None
    }
    for choice in output.outputs:
        if (log := logs.get(choice.index)) is None:
            continue
        finished = choice.finish_reason is not None
        choice.speculation = log.take(len(choice.token_ids), choice.text, finished=finished)
        if finished and (counts := choice.spec_decode_metrics) is not None:
            counts.per_step_accepted = [step.accepted for step in log.verify_steps]
            counts.per_step_drafted = [step.drafted for step in log.verify_steps]


def origins_of(choice: Any) -> Any:
    """What `attach` attached to a choice of a RequestOutput, or None."""
    return getattr(choice, "speculation", None)
