"""Forced spans: legal for the grammar, forced by it, and found at a price that texts do not set."""

from __future__ import annotations

import json
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar as xgr
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import ConstraintBounds
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar
from vllm.v1.structured_output.request import get_structured_output_key

from drafters.control.policy import Span
from drafters.train.embedded import EMBEDDED
from drafters.vllm.scheduling.forced_length import forced_length
from drafters.vllm.scheduling.forced_spans import (
    LONGEST_FORCED,
    LONGEST_TEXT,
    ForcedSpans,
    encoder,
    forced_text,
)
from tests.drafters.vllm.scheduling.schemas import other_constraints, random_schema

MOST = 10
TOKENIZER = AutoTokenizer.from_pretrained(str(EMBEDDED / "target"))
BYTES = xgr.TokenizerInfo.from_huggingface(TOKENIZER).decoded_vocab


class Manager:
    """What forced spans read of vLLM's StructuredOutputManager."""

    tokenizer, thinks = TOKENIZER, False

    def _get_constraint_bounds(self, request: Any, tokens: Any) -> ConstraintBounds:
        return ConstraintBounds(1, 1) if self.thinks else ConstraintBounds(0, 0)


class Answer:
    """What forced spans read of a vLLM Request, and its growing answer."""

    def __init__(self, grammar: Any, key: Any = (StructuredOutputOptions.JSON, "{}")) -> None:
        self.request_id = "answer"
        self.structured_output_request = SimpleNamespace(grammar=grammar, structured_output_key=key)
        self.all_token_ids = [1, 2, 3]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def add(self, token: int) -> None:
        assert self.structured_output_request.grammar.accept_tokens(self.request_id, [token])
        self.all_token_ids.append(token)


class Backend:
    """vLLM's backend with the embedded model's tokenizer; a compact one allows no white space."""

    def __init__(self, *, compact: bool) -> None:
        structured = SimpleNamespace(disable_any_whitespace=compact)
        config = SimpleNamespace(
            structured_outputs_config=structured, model_config=None, speculative_config=None
        )
        self.vocabulary = len(TOKENIZER)
        self._backend: Any = XgrammarBackend(config, TOKENIZER, self.vocabulary)  # type: ignore[arg-type]

    def answer(self, constraint: dict[str, Any]) -> Answer:
        if "choice" in constraint:  # vLLM's check of a request makes it a grammar
            options = " | ".join(json.dumps(option) for option in constraint["choice"])
            constraint = {"grammar": f"root ::= {options}"}
        key, text = get_structured_output_key(StructuredOutputsParams(**constraint))
        grammar = self._backend.compile_grammar(key, text, {TOKENIZER.eos_token_id})
        return Answer(grammar, (key, text))

    def legal(self, grammar: XgrammarGrammar) -> list[int]:
        """The tokens that may follow."""
        mask = xgr.allocate_token_bitmask(1, self.vocabulary)
        grammar.fill_bitmask(mask, 0)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: self.vocabulary]
        return np.flatnonzero(bits).tolist()  # type: ignore[no-any-return]


def forced_bytes(matcher: Any) -> bytes:
    """All that the matcher leaves no choice about, within a character too."""
    try:
        return bytes(matcher.find_jump_forward_string().encode())
    except UnicodeDecodeError as error:
        return bytes(error.object)


COMPACT, LOOSE = Backend(compact=True), Backend(compact=False)


def walk(backend: Backend, constraint: dict[str, Any], random: Random) -> tuple[int, int]:
    """Make an answer of legal tokens, forced or random ones, and check the span at each of its
    tokens. Returns how many tokens the answer has and how many of them were drafted."""
    answer, spans = backend.answer(constraint), ForcedSpans(Manager(), MOST)
    grammar = answer.structured_output_request.grammar
    drafted = length = 0
    kind, text = answer.structured_output_request.structured_output_key
    most_forced = forced_length(kind.name, text)
    if "triggers" in str(constraint):  # which random tokens hardly ever are
        for token in TOKENIZER.encode("<call>", add_special_tokens=False):
            answer.add(token)
    while not grammar.is_terminated() and length < 120:
        most = random.randint(0, MOST)
        forced = forced_bytes(grammar.matcher)
        assert len(forced.decode(errors="replace")) <= most_forced
        span = spans.after_newest(answer, most)
        assert len(span) <= most
        assert grammar.validate_tokens(span) == span
        assert forced.startswith(b"".join(BYTES[token] for token in span))
        follows = span[: random.randint(0, len(span))] if random.random() < 0.7 else []
        drafted += len(follows)
        for token in follows:
            answer.add(token)
        legal = backend.legal(grammar)
        answer.add(random.choice(legal))
        length += 1 + len(follows)
    return length, drafted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_a_span_of_a_schema_is_forced_and_legal(seed: int, compact: bool) -> None:
    random = Random(seed)
    schema = json.dumps(random_schema(random))
    walk(COMPACT if compact else LOOSE, {"json": schema}, random)


@pytest.mark.parametrize("constraint", other_constraints(), ids=lambda each: next(iter(each)))
def test_a_span_of_every_kind_of_constraint_is_forced_and_legal(constraint: Any) -> None:
    drafted = sum(walk(COMPACT, constraint, Random(seed))[1] for seed in range(20))
    if "grammar" in constraint:
        assert drafted == 0, "what it forces may have no end"
    elif "à" not in str(constraint):
        assert drafted > 0


@pytest.mark.parametrize(
    "constraint",
    [
        {"grammar": 'root ::= "a" x\nx ::= "b" root'},
        {"regex": "a{100000}"},
        {"json": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
        {"json": {"type": "array", "minItems": 100000, "items": {"const": "a"}}},
        {"json": {"type": "string", "pattern": "a{100000}"}},
    ],
    ids=lambda each: json.dumps(each),
)
def test_a_forced_text_without_an_end_in_sight_is_not_asked_for(
    constraint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher follows it in the scheduler's thread, and keeps all of it in memory."""
    key, text = get_structured_output_key(StructuredOutputsParams(**constraint))
    grammar = COMPACT.answer({"choice": ["positive"]}).structured_output_request.grammar
    asked: list[Any] = []
    monkeypatch.setattr(
        "drafters.vllm.scheduling.forced_spans.forced_text",
        lambda matcher: asked.append(matcher) or "positive",
    )
    spans, answer = ForcedSpans(Manager(), MOST), Answer(grammar, (key, text))
    assert spans.after_newest(answer, MOST) == []
    assert not asked
    assert forced_length(key.name, text) > LONGEST_FORCED


def test_a_constraint_is_measured_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(
        "drafters.vllm.scheduling.forced_spans.forced_length",
        lambda kind, text: measured.append(kind) or 10.0,
    )
    answer, spans = COMPACT.answer({"choice": ["positive"]}), ForcedSpans(Manager(), MOST)
    for token in TOKENIZER.encode("pos", add_special_tokens=False):
        assert spans.after_newest(answer, MOST)
        answer.add(token)
    assert measured == ["GRAMMAR"]


def text_of(backend: Backend, constraint: dict[str, Any], beginning: str) -> str:
    """The text of the span after an answer that begins so."""
    answer = backend.answer(constraint)
    for token in TOKENIZER.encode(beginning, add_special_tokens=False):
        answer.add(token)
    return str(TOKENIZER.decode(ForcedSpans(Manager(), MOST).after_newest(answer, MOST)))


def test_the_last_token_is_left_out_unless_the_answer_may_end_there() -> None:
    """What follows may be part of it: a quote and a colon are one token of many vocabularies."""
    schema = {
        "type": "object",
        "properties": {"customer_name": {"type": "string"}},
        "required": ["customer_name"],
    }
    assert text_of(LOOSE, {"json": schema}, '{"') == "customer_name"
    assert text_of(COMPACT, {"json": schema}, '{"') == 'customer_name":'
    assert text_of(COMPACT, {"choice": ["positive", "negative"]}, "pos") == "itive"


def test_a_long_text_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in it must not cost what the whole text does, and the tokens must be those of one
    tokenisation."""
    asked = []
    monkeypatch.setattr(
        "drafters.vllm.scheduling.forced_spans.forced_text",
        lambda matcher: asked.append(1) or forced_text(matcher),
    )
    value = "a long text without a choice, " * 200
    answer, spans = COMPACT.answer({"json": {"const": value}}), ForcedSpans(Manager(), MOST)
    drafted = 0
    while span := spans.after_newest(answer, MOST):
        for token in span:
            answer.add(token)
        drafted += len(span)
    assert TOKENIZER.decode(answer.all_token_ids[3:]) == json.dumps(value)
    assert len(asked) <= 2 + len(value) // (LONGEST_TEXT - 80)
    assert drafted == len(answer.all_token_ids) - 3


def test_spans_are_compared_with_the_tokens_that_came() -> None:
    """Whether they were drafted or not: a source that is not used must be able to come back."""
    answer, spans = COMPACT.answer({"json": {"const": "positive"}}), ForcedSpans(Manager(), 3)
    canonical = TOKENIZER.encode('"positive"', add_special_tokens=False)
    assert len(canonical) > 3
    assert spans.after_newest(answer, 3) == canonical[:3]
    assert spans.take_seen() == ()
    answer.add(canonical[0])
    assert spans.after_newest(answer, 3) == canonical[1:4]
    assert spans.take_seen() == (Span(1, 1),)
    single = next(token for token in range(256) if BYTES[token] == b"p")
    answer.add(single)  # another way to cut the same text
    assert spans.after_newest(answer, 0) == []
    spans.after_newest(answer, 3)
    assert spans.take_seen() == (Span(1, 0),)


def test_nothing_is_drafted_while_the_model_thinks() -> None:
    manager, answer = Manager(), COMPACT.answer({"json": {"const": "one of one"}})
    manager.thinks = True
    assert ForcedSpans(manager, MOST).after_newest(answer, MOST) == []
    manager.thinks = False
    assert ForcedSpans(manager, MOST).after_newest(answer, MOST)


def test_other_backends_and_no_grammar_give_no_span() -> None:
    spans, free = ForcedSpans(Manager(), MOST), Answer(None)
    assert spans.after_newest(free, MOST) == []
    free.structured_output_request = None  # type: ignore[assignment]
    assert spans.after_newest(free, MOST) == []
    guidance = GuidanceGrammar.__new__(GuidanceGrammar)
    assert spans.after_newest(Answer(guidance), MOST) == []


def test_no_span_after_the_end_of_a_grammar() -> None:
    answer = COMPACT.answer({"choice": ["done"]})
    for token in TOKENIZER.encode("done", add_special_tokens=False):
        answer.add(token)
    answer.add(TOKENIZER.eos_token_id)
    assert answer.structured_output_request.grammar.is_terminated()
    assert ForcedSpans(Manager(), MOST).after_newest(answer, MOST) == []


class SentencePiece:
    """A tokenizer that puts a space before the first word of a text, as SentencePiece does."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in " " + text]


def test_a_tokenizer_that_adds_a_space_gets_a_text_to_follow() -> None:
    assert encoder(SentencePiece())("name") == tuple(map(ord, "name"))
    plain = tuple(TOKENIZER.encode("name", add_special_tokens=False))
    assert encoder(TOKENIZER)("name") == plain
