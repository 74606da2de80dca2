"""Which token of an answer was drafted and which one the target chose itself, step by step.

The engine core tells with each output how many draft tokens a sequence has had verified so far, and
how many were accepted (drafters/vllm/scheduling/scheduler.py). What a step adds to these counts
says where its tokens come from: the accepted drafts come first, and the target's own token ends the
step.

A token's text is what it added to the answer, as vLLM's detokenizer says. It is handed out once the
text that the client has been sent reaches to its end: text that might still turn out to be a stop
string is held back, and its tokens with it. No vllm import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "aerie_token_log"  # of vLLM's RequestState, for sequences whose tokens are told


@dataclass(frozen=True)
class SequenceStep:
    """Draft tokens of one sequence in one engine step. `verified`: whether it had any."""

    drafted: int = 0
    accepted: int = 0
    verified: bool = False


class TokenLog:
    """Steps and tokens of one sequence, and how far they have been handed out."""

    def __init__(self) -> None:
        self.steps: list[SequenceStep] = []
        self._counted = SequenceStep()  # sums of all steps so far
        self._verify_steps = 0
        self._origins: list[tuple[int, int]] = []  # of each token: its step, its place in the step
        self._texts: list[str] = []
        self._tokens_sent = self._characters_sent = 0  # as outputs
        self._tokens_told = self._characters_told = self._steps_told = 0  # as origins

    def add_text(self, text: str) -> str:
        """Note what the next token added to the answer."""
        self._texts.append(text)
        return text

    def add_step(self, tokens: int, counts: Any = None) -> None:
        """Note a step that produced so many tokens. `counts` are vLLM's RequestSpecDecodeMetrics
        of all steps so far, None where nothing was verified yet."""
        step = SequenceStep()
        if counts is not None:
            accepted = sum(j * steps for j, steps in enumerate(counts.histogram))
            verify_steps = sum(counts.histogram)
            step = SequenceStep(
                counts.num_draft_tokens - self._counted.drafted,
                accepted - self._counted.accepted,
                verify_steps > self._verify_steps,
            )
            self._counted = SequenceStep(counts.num_draft_tokens, accepted)
            self._verify_steps = verify_steps
        if not tokens and not step.verified:
            return
        self._origins += [(len(self.steps), place) for place in range(tokens)]
        self.steps.append(step)

    def take(self, tokens: int, text: str, *, finished: bool) -> dict[str, Any]:
        """What is known once an output with so many tokens and this text goes to the client.

        Returns {"tokens": [...], "steps": [...]}, what was not told before. The texts of the
        tokens together are a beginning of the answer, and all of it once it is `finished`.
        """
        self._tokens_sent += tokens
        self._characters_sent += len(text)
        told: list[dict[str, Any]] = []
        while self._tokens_told < self._tokens_sent:
            index = self._tokens_told
            # The token that ends a turn has no text: it is not detokenised.
            added = self._texts[index] if index < len(self._texts) else ""
            room = self._characters_sent - self._characters_told
            if len(added) > room:
                if not finished:
                    break
                added = added[:room]  # the rest belongs to a stop string
            self._tokens_told += 1
            self._characters_told += len(added)
            told.append(self._token(added, *self._origins[index]))
        begun = len(self.steps) if finished else (told[-1]["step"] + 1 if told else 0)
        steps = self.steps[self._steps_told : begun]
        self._steps_told = max(self._steps_told, begun)
        return {
            "tokens": told,
            "steps": [{"drafted": step.drafted, "accepted": step.accepted} for step in steps],
        }

    def _token(self, text: str, step: int, place: int) -> dict[str, Any]:
        token: dict[str, Any] = {"text": text, "step": step}
        if place < self.steps[step].accepted:
            return token | {"origin": "draft", "position": place + 1}
        return token | {"origin": "target"}

    @property
    def verify_steps(self) -> list[SequenceStep]:
        """Steps that verified drafts: what vLLM's `per_step_*` lists are made of."""
        return [step for step in self.steps if step.verified]


def watch(sequence: Any) -> None:
    """Log steps and tokens of a RequestState of vLLM (vllm/v1/engine/output_processor.py)."""
    log = TokenLog()
    setattr(sequence, _ATTRIBUTE, log)
    decode = getattr(sequence.detokenizer, "decode_next", None)
    if decode is not None:  # without a tokenizer no token has a text
        sequence.detokenizer.decode_next = lambda token: log.add_text(decode(token))


def log_of(sequence: Any) -> TokenLog | None:
    """The log of a sequence that is watched."""
    return getattr(sequence, _ATTRIBUTE, None)


def record(outputs: Iterable[Any], sequences: Mapping[str, Any]) -> None:
    """Enter the engine core's outputs of one step, before vLLM processes them, in the logs of
    those `sequences` that are watched."""
    for output in outputs:
        log = log_of(sequences.get(output.request_id))
        if log is not None:
            log.add_step(len(output.new_token_ids), output.spec_decode_metrics)


def attach(output: Any, sequences: Iterable[Any]) -> None:
    """Give each choice of a RequestOutput of vLLM, as `speculation`, what is known of its tokens
    once it is sent; and complete the counts of one that has ended with those of its steps."""
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
