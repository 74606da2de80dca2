"""Forced spans: draft tokens that a request's grammar leaves no choice about.

The names of a JSON schema's fields, the rest of a choice once its beginning is unique, the frame of
a tool call: the grammar allows one text, though not one tokenisation. The text is what the matcher
of xgrammar says, from the request's newest token on. The tokens are those of the tokenizer, since
the target was trained on them: of the small embedded target, 55% of such texts are the same when
they are cut into the longest tokens of the vocabulary instead; of SmolLM2, 96%.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from drafters.control.policy import Span
from drafters.vllm.scheduling.forced_length import forced_length

# Characters that a constraint may force in a row for its requests to have spans. The matcher
# follows a forced text to its end, 0.1 us a character, wherever the end is.
LONGEST_FORCED = 8192
LONGEST_TEXT = 1024  # characters of a forced text that are tokenised at once
REMEMBERED_TEXTS = 512  # of which the tokens are remembered
ANCHOR = "\n"  # text before a forced one where a tokenizer would add a space at the beginning


class _Ahead(NamedTuple):
    """Forced tokens of a request, drafted or not."""

    after: int  # tokens of the request, prompt and answer, that they follow
    tokens: tuple[int, ...]


class ForcedSpans:
    """The forced spans of a scheduler's requests.

    A forced text is asked for once and followed while the answer does, so that a step in a long one
    does not cost what the whole text does: xgrammar takes 0.1 us a character, 2 us where nothing is
    forced.
    """

    def __init__(self, manager: Any, most: int) -> None:
        """`manager` is the scheduler's StructuredOutputManager, whose tokenizer is used. A span has
        `most` draft tokens at most."""
        self._manager = manager
        self._most = most
        self._encode: Callable[[str], tuple[int, ...]] | None = None  # made with the first text
        self._ahead: dict[str, _Ahead] = {}  # by request
        self._is_short: dict[str, bool] = {}  # by request: what its constraint forces has an end
        self._seen: list[Span] = []

    def forget_ended(self, requests: Mapping[str, Any]) -> None:
        """Forget all requests but those that the scheduler has, by id."""
        for by_request in (self._ahead, self._is_short):
            for name in by_request.keys() - requests.keys():
                del by_request[name]

    def take_seen(self) -> tuple[Span, ...]:
        """How answers kept to the spans before their newest tokens, since the last call."""
        seen, self._seen = tuple(self._seen), []
        return seen

    def after_newest(self, request: Any, most: int) -> list[int]:
        """The forced tokens behind the newest one of a vLLM Request, `most` at most.

        None while the grammar is not in force (a model that thinks), where it has ended, where its
        constraint may force more than `LONGEST_FORCED` characters in a row, and with a backend
        other than xgrammar, which does not say what is forced. Each token is one that the
        grammar accepts after those before it. The last token of a forced text is left out if text
        may follow that would be part of it.
        """
        structured = request.structured_output_request
        grammar = structured.grammar if structured is not None else None
        if most < 1 or not isinstance(grammar, XgrammarGrammar) or grammar.is_terminated():
            return []
        if self._manager._get_constraint_bounds(request, ()).constraint_start:
            return []
        if not self._forces_little(request.request_id, structured):
            return []
        tokens = self._followed(request) or self._asked(request, grammar.matcher)
        return grammar.validate_tokens(list(tokens[:most]))

    def _forces_little(self, name: str, structured: Any) -> bool:
        """Whether the matcher of a request may be asked what is forced; found once a request."""
        if name not in self._is_short:
            kind, constraint = structured.structured_output_key
            self._is_short[name] = forced_length(kind.name, constraint) <= LONGEST_FORCED
        return self._is_short[name]

    def _followed(self, request: Any) -> tuple[int, ...]:
        """What is left of forced tokens that the answer has followed so far."""
        ahead = self._ahead.get(request.request_id)
        if ahead is None:
            return ()
        count = request.num_tokens
        came = request.all_token_ids[ahead.after : count]
        compared, equal = min(len(came), len(ahead.tokens)), 0
        while equal < compared and came[equal] == ahead.tokens[equal]:
            equal += 1
        if compared:
            self._seen.append(Span(min(compared, self._most), min(equal, self._most)))
        if equal < len(came):
            return ()
        left = ahead.tokens[equal:]
        self._ahead[request.request_id] = _Ahead(count, left)
        return left

    def _asked(self, request: Any, matcher: Any) -> tuple[int, ...]:
        """Forced tokens as the matcher has them; remembered for the request."""
        text = forced_text(matcher)
        if not text:
            self._ahead.pop(request.request_id, None)
            return ()
        if self._encode is None:
            self._encode = lru_cache(REMEMBERED_TEXTS)(encoder(self._manager.tokenizer))
        tokens = self._encode(text[:LONGEST_TEXT])
        if len(text) > LONGEST_TEXT or not ends_with(matcher, text):
            tokens = tokens[:-1]
        self._ahead[request.request_id] = _Ahead(request.num_tokens, tokens)
        return tokens


def forced_text(matcher: Any) -> str:
    """The text that a GrammarMatcher of xgrammar allows no other than, from its state on: whole
    characters. Empty in the middle of a character."""
    try:
        return str(matcher.find_jump_forward_string())
    except UnicodeDecodeError as error:  # it begins or ends with a part of a character
        return bytes(error.object[: error.start]).decode()


def ends_with(matcher: Any, text: str) -> bool:
    """Whether a GrammarMatcher may end after `text`, which it is known to allow. Its state is the
    same afterwards."""
    matcher.accept_string(text)
    ends: bool = matcher.is_completed()
    matcher.rollback(1)
    return ends


def encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    """A function from a text to its tokens as they follow another text, for a tokenizer of vLLM.
    SentencePiece puts a space before the first word of a text: it gets an anchor to follow."""

    def plain(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    before = plain(ANCHOR)
    if plain("a") == plain(ANCHOR + "a")[len(before) :]:
        return lambda text: tuple(plain(text))

    def anchored(text: str) -> tuple[int, ...]:
        tokens = plain(ANCHOR + text)
        joined = tokens[: len(before)] != before
        return () if joined else tuple(islice(tokens, len(before), None))

    return anchored
