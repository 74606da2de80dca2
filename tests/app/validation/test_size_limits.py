"""Bounds on lists, schemas and URLs: at the bound it passes, one beyond it names the field."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.errors import ApiError
from app.settings import LimitSettings
from app.validation import constraints, size_limits
from tests.app.validation.schema_holders import HOLDERS, form
from tests.app.validation.test_json_schema import repeated

LIMITS = LimitSettings(
    max_choices=8,
    max_prompts=2,
    max_messages=3,
    max_input_items=3,
    max_content_parts=4,
    max_token_list=2,
    max_bad_words=2,
    max_bad_words_length=8,
    max_stop_length=6,
    max_tools=2,
    max_schema_kib=1,
    max_schema_depth=8,
    max_schema_properties=5,
    max_pattern_length=10,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def parts(messages: int, each: int) -> Any:
    return [{"content": [{"type": "text", "text": ""}] * each}] * messages


def calls(values: int) -> Any:
    """Two calls whose arguments hold so many values together."""
    return [{"tool_calls": [{"function": {"name": "f", "arguments": "1," * (values // 2)}}] * 2}]


def refusal(payload: dict[str, Any], limits: LimitSettings = LIMITS) -> ApiError | None:
    try:
        size_limits.check_counts(payload, limits)
        size_limits.check_constraints(payload, limits)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": ["x", "y"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({}, 1),
        # Nothing has been checked yet: no shape may break it or make it negative.
        ({"n": "3", "prompt": {}}, 1),
        ({"n": -3}, 1),
        ({"n": True}, 1),
        ({"n": None, "prompt": []}, 1),
    ],
)
def test_sequences_are_choices_of_each_prompt(asked: dict[str, Any], expected: int) -> None:
    assert size_limits.count_sequences(asked) == expected


@pytest.mark.parametrize(
    ("fits", "too_much", "param", "bound"),
    [
        ({"logit_bias": {"1": 1}}, {"logit_bias": dict.fromkeys("abc")}, "logit_bias", "2"),
        ({"prompt": ["a", "b"], "n": 4}, {"prompt": ["a", "b"], "n": 5}, "n", "8"),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "2"),
        ({"bad_words": ["a"] * 2}, {"bad_words": ["a"] * 3}, "bad_words", "2"),
        ({"bad_words": ["a" * 6]}, {"bad_words": ["a" * 7]}, "bad_words", "6"),
        ({"bad_words": ["a" * 4] * 2}, {"bad_words": ["a" * 4, "a" * 5]}, "bad_words", "8"),
        (
            {"prompt": ["a", "b"], "bad_words": ["a"]},
            {"prompt": ["a", "b"], "bad_words": ["a", "b"]},
            "bad_words",
            "2 entries (--max-bad-words)",
        ),
        (
            {"prompt": [[1], [2]], "bad_words": ["a" * 4]},
            {"prompt": [[1], [2]], "bad_words": ["a" * 5]},
            "bad_words",
            "8 characters (--max-bad-words-length)",
        ),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}, "prompt", "2"),
        ({"prompt": [[1], [2]]}, {"prompt": [[1], [2], [3]]}, "prompt", "2"),
        ({"prompt": [1] * 100}, {"prompt": [[1] * 100] * 3}, "prompt", "2"),
        ({"messages": [1] * 3}, {"messages": [1] * 4}, "messages", "3"),
        ({"input": [1] * 3}, {"input": [1] * 4}, "input", "3"),
        ({"messages": parts(2, 2)}, {"messages": parts(2, 3)}, "messages", "4"),
        ({"input": parts(2, 2)}, {"input": parts(2, 3)}, "input", "4"),
        (
            {"messages": [{"content": [{"content": [{}, {}]}]}]},
            {"messages": [{"content": [{"content": [{}] * 4}]}]},
            "messages",
            "4",
        ),
        ({"system": [{}] * 4}, {"system": [{}] * 5}, "system", "4"),
        ({"messages": [{"tool_calls": [{}] * 4}]}, {"messages": [{"tool_calls": [{}] * 5}]},
         "messages", "4"),
        ({"messages": calls(60_000)}, {"messages": calls(70_000)}, "messages", "65536"),
        ({"input": [{"arguments": "[" * 60_000}]}, {"input": [{"arguments": "[" * 70_000}]},
         "input", "65536"),
        ({"tools": [{}] * 2}, {"tools": [{}] * 3}, "tools", "2"),
        ({"response_format": nested(8)}, {"response_format": nested(9)}, "response_format", "8"),
        ({"tools": [{}, nested(8)]}, {"tools": [{}, nested(9)]}, "tools[1]", "8"),
        ({"text": nested(8)}, {"text": nested(900)}, "text", "8"),
        (
            {"structured_outputs": {"json": json.dumps(nested(7))}},
            {"structured_outputs": {"json": json.dumps(nested(8))}},
            "structured_outputs",
            "8",
        ),
        (
            {"structured_outputs": {"grammar": "x" * 1000}},
            {"structured_outputs": {"grammar": "x" * 1020}},
            "structured_outputs",
            "1 KiB",
        ),
        (
            {"structured_outputs": {"choice": ["x"] * 200}},
            {"structured_outputs": {"choice": ["x"] * 500}},
            "structured_outputs",
            "1 KiB",
        ),
        (
            {"structured_outputs": {"regex": "x" * 10}},
            {"structured_outputs": {"regex": "x" * 11}},
            "structured_outputs",
            "10",
        ),
        (
            {"response_format": {"a": {"pattern": "x" * 10}}},
            {"response_format": {"a": {"pattern": "x" * 11}}},
            "response_format",
            "10",
        ),
        (
            {"response_format": {"required": list("abcde") * 2}},
            {"response_format": {"required": list("abcdef")}},
            "response_format",
            "5 entries, required ones included (--max-schema-properties)",
        ),
        (
            {"tools": [{"properties": {"a": {}, "b": {}, "c": {}}, "required": list("cde")}]},
            {"tools": [{"properties": {"a": {}, "b": {}, "c": {}}, "required": list("def")}]},
            "tools[0]",
            "5 entries, required ones included (--max-schema-properties)",
        ),
        (
            {"response_format": {"enum": [10**18] * 40}},
            {"response_format": {"enum": [10**18] * 60}},
            "response_format",
            "1 KiB (--max-schema-kib)",
        ),
        (
            {"response_format": {"enum": [-1.25e-300] * 60, "const": [None, True]}},
            {"response_format": {"enum": [-1.25e-300] * 100}},
            "response_format",
            "1 KiB (--max-schema-kib)",
        ),
        (
            {"prompt": ["a", "b"], "response_format": {"a": "x" * 500}},
            {"prompt": ["a", "b"], "response_format": {"a": "x" * 600}},
            "response_format",
            "times 2 prompts is larger than 1 KiB (--max-schema-kib)",
        ),
        (
            {"prompt": "ab", "structured_outputs": {"grammar": "x" * 600}},
            {"prompt": [[1], [2]], "structured_outputs": {"grammar": "x" * 600}},
            "structured_outputs",
            "times 2 prompts is larger than 1 KiB (--max-schema-kib)",
        ),
        (
            {"response_format": {f"p{i}": 1 for i in range(5)}},
            {"response_format": {f"p{i}": 1 for i in range(6)}},
            "response_format",
            "5",
        ),
    ],
)  # fmt: skip
def test_at_the_bound_and_beyond(
    fits: dict[str, Any], too_much: dict[str, Any], param: str, bound: str
) -> None:
    assert refusal(fits) is None
    error = refusal(too_much)
    assert error is not None
    assert (error.status, error.param) == (400, param)
    assert bound in error.message


@pytest.mark.parametrize(
    "payload",
    [
        {"logit_bias": 5, "tools": "x", "messages": None, "prompt": {}, "response_format": "json"},
        {"tools": [None, "x"]},
        {"structured_outputs": {"json": "{not json"}},
        {"structured_outputs": {"json": "[" * 1000}},
        {"prompt": []},
    ],
)
def test_what_has_the_wrong_shape_is_left_to_others(payload: dict[str, Any]) -> None:
    assert refusal(payload) is None


def required_names(count: int) -> Any:
    """Names that the enforceable form turns into properties, each with a reference."""
    names = [f"n{number}" for number in range(count)]
    return {"type": "object", "required": names, "additionalProperties": {"minimum": 0}}


PLACES: list[tuple[Callable[[Any], dict[str, Any]], str]] = [
    *((holder, place) for _, holder, place in HOLDERS),
    (
        lambda schema: {"response_format": form(json_schema={"schema": schema, "strict": False})},
        "response_format.json_schema.schema",
    ),
    (
        lambda schema: {"tools": [{"type": "function", "function": {"parameters": schema}}]},
        "tools[0].function.parameters",
    ),
    (lambda schema: {"tools": [{"input_schema": schema}]}, "tools[0].input_schema"),
]


@pytest.mark.parametrize(("holder", "place"), PLACES)
def test_the_enforceable_form_of_a_schema_has_the_bounds_of_a_schema(
    holder: Callable[[Any], dict[str, Any]], place: str
) -> None:
    """Wherever a schema stands, and whether it is strict or not."""
    limits = LimitSettings(max_schema_kib=1, max_choices=8)
    constraints.check_schemas(holder(required_names(20)), limits)
    with pytest.raises(ApiError) as caught:
        constraints.check_schemas(holder(required_names(60)), limits)
    assert (caught.value.status, caught.value.param) == (400, place)
    assert "written as it is enforced, is larger than 1 KiB (--max-schema-kib)" in (
        caught.value.message
    )


@pytest.mark.parametrize(("holder", "place"), PLACES)
def test_nested_required_names_are_served(
    holder: Callable[[Any], dict[str, Any]], place: str
) -> None:
    payload = holder(repeated(45))
    size_limits.check_constraints(payload, LimitSettings())
    constraints.check_schemas(payload, LimitSettings())


def test_the_enforceable_form_counts_for_every_prompt() -> None:
    limits = LimitSettings(max_schema_kib=4)
    payload = PLACES[0][0](required_names(60))
    constraints.check_schemas(payload, limits)
    with pytest.raises(ApiError) as caught:
        constraints.check_schemas({**payload, "prompt": ["a"] * 8}, limits)
    assert "times 8 prompts" in caught.value.message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (PLACES[0][0]({"enum": ["x" * 60_000]}), "response_format"),
        ({"bad_words": [f"w{number}" for number in range(128)]}, "bad_words"),
    ],
)
def test_what_is_done_for_every_prompt_is_counted_for_every_prompt(
    more: dict[str, Any], param: str
) -> None:
    """With the bounds as they are by default: as much work as one prompt may ask for."""
    for prompt in ("a", ["a"]):
        assert refusal({"prompt": prompt, **more}, LimitSettings()) is None
    error = refusal({"prompt": ["a"] * 128, **more}, LimitSettings())
    assert error is not None
    assert error.param == param


def test_templates_are_not_taken_from_requests() -> None:
    for payload in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": ""}}):
        with pytest.raises(ApiError) as caught:
            size_limits.check_template(payload)
        assert caught.value.param in payload
    size_limits.check_template({"chat_template": None, "chat_template_kwargs": {"enable": True}})
    size_limits.check_template({"chat_template_kwargs": "x"})


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"tools": [{}] * 9999},
        {"padding": "max_length", "max_length": 10**9},
        {"tokenizer_kwargs": {"padding": True}},
        {"tokenize": None},
    ],
)
def test_only_variables_of_the_template_are_handed_to_it(given: dict[str, Any]) -> None:
    """The renderer would take these for arguments of its own, and nobody has checked them."""
    with pytest.raises(ApiError) as caught:
        size_limits.check_template({"chat_template_kwargs": given})
    assert caught.value.param == f"chat_template_kwargs.{next(iter(given))}"


def test_every_parameter_of_the_renderer_is_known() -> None:
    """A new one of the tokenizers' library would be a new way past the checks."""
    signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    named = {p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert named - {"self", "chat_template"} <= size_limits._RENDERING


def image(url: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://example.org.evil.test/a.png",
        "https://evil.test/?example.org",
        "https://example.org@evil.test/a.png",
        "https://user@example.org/a.png",
        "HTTP://EVIL.test/",
        " http://evil.test/",
        "//evil.test/a.png",
        "file:///etc/passwd",
        "ftp://example.org/a",
        "http://[::1]/",
        "http://[broken",
        "http:/evil.test",
        "\x00\x1f\thttp://evil.test/",
        "gopher://example.org/",
    ],
)
def test_urls_outside_of_the_list_are_refused(url: str) -> None:
    with pytest.raises(ApiError) as caught:
        size_limits.check_urls(image(url), "messages", frozenset({"example.org"}))
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    "url",
    [
        "Note: no URL",
        "data:image/png;base64,AAAA",
        "https://example.org/a.png",
        "http://EXAMPLE.org:80/a",
    ],
)
def test_media_inside_or_from_an_allowed_host_pass(url: str) -> None:
    size_limits.check_urls(image(url), "messages", frozenset({"example.org"}))


def test_no_host_is_allowed_unless_named() -> None:
    assert LimitSettings().media_hosts == frozenset()
    assert LimitSettings(media_domains=" a.test, B.test,").media_hosts == {"a.test", "b.test"}
    with pytest.raises(ApiError):
        size_limits.check_urls(image("https://example.org/a"), "messages", frozenset())


def test_text_that_speaks_of_urls_is_text() -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "http://evil.test"}]}]
    size_limits.check_urls(talk, "messages", frozenset())
    size_limits.check_urls([{"role": "user", "content": "http://x"}], "messages", frozenset())
