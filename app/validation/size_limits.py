"""Size limits of a request: lists, schemas, grammars, URLs. No vllm import.

A schema within its limits is parsed in a third of a second (xgrammar, 64 KiB, depth 64) and
compiled in half of one; without them, 300 nested objects take 15 s of the event loop, and 1,500
properties 20 s of the engine's compiler, which every other constrained request waits for.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from app.errors import shorten
from app.json_structure import at_most
from app.settings import LimitSettings
from app.validation.field_checks import check_n, invalid
from app.validation.message_checks import MEDIA
from app.validation.schema_types import required

# Fields that constrain the output or describe tools, in every dialect.
CONSTRAINTS = ("response_format", "structured_outputs", "text", "output_config")
_TOKEN_LISTS = ("logit_bias", "stop_token_ids", "allowed_token_ids")
# Where a constraint holds another one as text.
_JSON_TEXTS = ("json", "structural_tag")
_PATTERNS = ("pattern", "regex")
# Fields of messages, items and parts that are lists of parts or calls, in every dialect.
_PART_LISTS = ("content", "output", "summary", "tool_calls")
# Most values of the JSON in all arguments of a conversation's calls: 20 ms to decode.
ARGUMENT_VALUES = 65_536
# Parameters of rendering and tokenising that vLLM would take from `chat_template_kwargs`, bypassing
# the checks of the fields that they belong to, and every bound (`max_length` pads).
_RENDERING = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        "tokenizer_kwargs",
    }
)
# Characters that URL parsers skip at the beginning, and what they read as a URL behind these.
_IGNORED = "".join(map(chr, range(33)))
_URL = re.compile(
    rf"[{re.escape(_IGNORED)}]*(?:https?:|file:|[a-z][a-z0-9+.-]*://|//)", re.IGNORECASE
)


def check_template(payload: Mapping[str, Any]) -> None:
    """Refuse a chat template, and variables of the template that are parameters of the renderer.

    A template is a program: only the served model's own runs here.
    """
    given = payload.get("chat_template_kwargs")
    given = given if isinstance(given, dict) else {}
    for name, value in (
        ("chat_template", payload.get("chat_template")),
        ("chat_template_kwargs", given.get("chat_template")),
    ):
        if value is not None:
            raise invalid(name, f"A chat template in '{name}' is not taken from requests.")
    for name in given:
        if name in _RENDERING:
            where = "chat_template_kwargs"
            raise invalid(
                f"{where}.{name}",
                f"'{name}' is not a variable of the template, which '{where}' is for.",
            )


def check_counts(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    """Check the length of every list that a client can make long. Raises ApiError."""
    for name in _TOKEN_LISTS:
        _check_length(payload.get(name), name, limits.max_token_list, "entries")
    _check_bad_words(payload.get("bad_words"), count_prompts(payload), limits)
    _check_length(payload.get("messages"), "messages", limits.max_messages, "items")
    _check_length(payload.get("input"), "input", limits.max_input_items, "items")
    for name in ("messages", "input"):
        _check_parts(payload.get(name), name, limits.max_content_parts)
    _check_parts([{"content": payload.get("system")}], "system", limits.max_content_parts)
    _check_length(payload.get("tools"), "tools", limits.max_tools, "tools")
    _check_prompts(payload, limits)


def check_choices(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    """Check how many prompts and choices a request asks for. Raises ApiError.

    A request waits for a slot for each of them, and others wait behind it: whoever asks for more
    than any request may have is refused before.
    """
    _check_prompts(payload, limits)
    check_n(payload.get("n"), limits)


def _check_prompts(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    prompts, n = count_prompts(payload), payload.get("n")
    check_count(prompts, "prompt", limits.max_prompts, "prompts")
    if prompts > 1 and isinstance(n, int) and n * prompts > limits.max_choices:
        most = limits.max_choices
        raise invalid("n", f"'n' times the number of prompts must be at most {most}.")


def _check_bad_words(words: Any, prompts: int, limits: LimitSettings) -> None:
    """Check bad words, alone and together: vLLM tokenises each of them twice on the event loop, and
    does so for every prompt."""
    name = "bad_words"
    _check_length(words, name, limits.max_bad_words, "entries")
    texts = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    if any(len(text) > limits.max_stop_length for text in texts):
        most = limits.max_stop_length
        raise invalid(name, f"Each of '{name}' must have at most {most} characters.")
    characters = sum(map(len, texts))
    if characters > limits.max_bad_words_length:
        most = limits.max_bad_words_length
        raise invalid(name, f"'{name}' must have at most {most} characters together.")
    for count, most, what, setting in (
        (len(texts), limits.max_bad_words, "entries", "--max-bad-words"),
        (characters, limits.max_bad_words_length, "characters", "--max-bad-words-length"),
    ):
        if count * prompts > most:
            raise invalid(
                name,
                f"'{name}' times the number of prompts must be at most {most} {what} ({setting}), "
                f"got {count} for each of {prompts} prompts.",
            )


def _check_length(value: Any, name: str, most: int, what: str) -> None:
    if isinstance(value, list | dict):
        check_count(len(value), name, most, what)


def check_count(count: int, name: str, most: int, what: str) -> None:
    """Refuse more than `most` entries of a field. `what` are its entries."""
    if count > most:
        raise invalid(name, f"'{name}' takes at most {most} {what}, got {count}.")


def _check_parts(items: Any, name: str, most: int) -> None:
    """Check the parts of all messages together, and the JSON texts in them that vLLM decodes.

    The number of messages bounds neither, and the number of the body's values not the texts.
    """
    parts = 0
    texts: list[str] = []
    waiting = [items]
    while waiting:
        level = waiting.pop()
        for item in level if isinstance(level, list) else ():
            if not isinstance(item, dict):
                continue
            for field in _PART_LISTS:
                if isinstance(entries := item.get(field), list):
                    parts += len(entries)
                    waiting.append(entries)
            function = item.get("function")
            for holder in (item, function if isinstance(function, dict) else {}):
                if isinstance(text := holder.get("arguments"), str):
                    texts.append(text)
        if parts > most:
            raise invalid(name, f"'{name}' takes at most {most} content parts in all.")
    if not at_most(texts, ARGUMENT_VALUES):
        message = f"The arguments of calls in '{name}' hold more than {ARGUMENT_VALUES} values."
        raise invalid(name, message)


def check_constraints(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    """Check size, depth and width of schemas, grammars and tools. Raises ApiError naming the
    field."""
    for name in CONSTRAINTS:
        if isinstance(payload.get(name), dict | list):
            check_schema(payload[name], name, limits, prompts=count_prompts(payload))
    tools = payload.get("tools")
    if isinstance(tools, list):
        for index, tool in enumerate(tools):
            check_schema(tool, f"tools[{index}]", limits)


def count_prompts(payload: Mapping[str, Any]) -> int:
    """How many prompts a completions request has: vLLM does the work of a constraint and of the bad
    words for each of them, all on the event loop and without a pause."""
    prompt = payload.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def count_sequences(payload: Mapping[str, Any]) -> int:
    """How many sequences a request asks for: its choices of each of its prompts. Nothing has to be
    checked before: an `n` that is no number counts as not given."""
    n = payload.get("n")
    return count_prompts(payload) * (max(1, n) if isinstance(n, int) else 1)


def check_schema(
    schema: Any, where: str, limits: LimitSettings, *, prompts: int = 1, form: str = ""
) -> None:
    """Check one schema, breadth first, not by recursion: the depth is the client's choice.

    `prompts` is how often it is compiled, `form` what the message says of the schema's form. Raises
    ApiError naming `where`.
    """
    most = int(limits.max_schema_kib * 1024)
    size, waiting = 0, deque([("", schema, 1)])
    while waiting:
        key, value, depth = waiting.popleft()
        size += len(key) + 1
        if isinstance(value, str):
            size += len(value)
            if key in _PATTERNS and len(value) > limits.max_pattern_length:
                raise invalid(
                    where,
                    f"A regular expression in '{where}' has more than "
                    f"{limits.max_pattern_length} characters (--max-pattern-length).",
                )
            if key in _JSON_TEXTS and size <= most:
                waiting.append(("", decoded(value), depth))
        elif isinstance(value, dict | list):
            if depth > limits.max_schema_depth:
                raise invalid(
                    where,
                    f"'{where}'{form} is nested more than {limits.max_schema_depth} levels deep "
                    "(--max-schema-depth).",
                )
            if isinstance(value, dict):
                if _width(value) > limits.max_schema_properties:
                    raise invalid(
                        where,
                        f"An object in '{where}'{form} has more than "
                        f"{limits.max_schema_properties} entries, required ones included "
                        "(--max-schema-properties).",
                    )
                waiting.extend((name, item, depth + 1) for name, item in value.items())
            else:
                size += len(value)
                waiting.extend(("", item, depth + 1) for item in value)
        else:
            size += len(str(value))  # a number, true, false or null
        if size * prompts > most:
            times = f" times {prompts} prompts" if prompts > 1 else ""
            raise invalid(
                where,
                f"'{where}'{form}{times} is larger than {limits.max_schema_kib:g} KiB "
                "(--max-schema-kib).",
            )


def _width(value: dict[str, Any]) -> int:
    """Entries of an object, or the properties that it names as a schema if these are more:
    required ones count as those in `properties` do."""
    names = required(value)
    if not names:
        return len(value)
    properties = value.get("properties")
    return max(len(value), len({*names, *(properties if isinstance(properties, dict) else ())}))


def decoded(value: Any) -> Any:
    """A constraint that is sent as JSON text, parsed; any other value as it is. None if the text is
    invalid or deeper than Python goes, which vLLM then reports."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def check_urls(items: Any, where: str, hosts: frozenset[str]) -> None:
    """Refuse URLs of media on hosts that are not allowed, for a model that takes media.

    Otherwise a client could make the gateway fetch from its own network.
    """
    waiting: deque[tuple[str, Any, bool]] = deque([(where, items, False)])
    while waiting:
        place, value, media = waiting.popleft()
        if isinstance(value, list):
            waiting.extend((f"{place}[{i}]", item, media) for i, item in enumerate(value))
        elif isinstance(value, dict):
            kind = value.get("type")
            inside = media or (isinstance(kind, str) and kind in MEDIA)
            waiting.extend(
                (f"{place}.{name}", item, inside or name in MEDIA) for name, item in value.items()
            )
        elif isinstance(value, str) and media:
            _check_url(value, place, hosts)


def _check_url(text: str, place: str, hosts: frozenset[str]) -> None:
    if not _URL.match(text):
        return
    try:
        parts = urlsplit(text.lstrip(_IGNORED))
        scheme, host = parts.scheme.lower(), (parts.hostname or "").lower()
    except ValueError:
        raise invalid(place, f"'{place}' is not a URL.") from None
    if scheme not in ("http", "https") or host not in hosts or parts.username is not None:
        name = shorten(host or scheme)
        raise invalid(
            place, f"'{place}' names {name}, which is not among the hosts allowed for media."
        )
