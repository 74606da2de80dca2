"""Answers and prompts of gpt-oss, whose Harmony format vLLM reads by tokens and not by text."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager

from app.endpoints import declared
from app.llm.vllm_errors import from_exception
from app.serving.adapter import _parsing
from app.serving.classes.messages import MessagesServing
from app.serving.classes.responses import ResponsesServing
from app.serving.parsers.consistent import bounds_reasoning, consistent
from app.serving.renderer import Renderer, _warn_of_unread
from app.serving.request_models import TokenizeMessagesRequest
from app.serving.response_fields import published_event
from app.settings import load

FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = (
    "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
    '{"a": 1}<|call|>'
)
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tokens(text: str) -> list[int]:
    return list(get_encoding().encode(text, allowed_special="all"))


def chat(**fields: Any) -> ChatCompletionRequest:
    given = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return ChatCompletionRequest.model_validate(given)


PARSER: Any = ParserManager.get_parser(
    tool_parser_name="openai", reasoning_parser_name="openai_gptoss",
    enable_auto_tools=True, model_name="m", is_harmony=True,
)  # fmt: skip
TOKENIZER = SimpleNamespace(
    get_vocab=dict,
    decode=get_encoding().decode,
    truncation_side="left",  # as vLLM loads them
)


def parser(request: Any) -> Any:
    return consistent(PARSER)(TOKENIZER, request.tools)


def whole(text: str, request: Any) -> tuple[str | None, str | None, list[Any] | None]:
    found = parser(request).parse("", request, True, tokens(text))
    return found[0], found[1], found[2]


def streamed(text: str, request: Any, size: int) -> tuple[str, str, int]:
    """Reasoning, content and the number of calls of a stream of `size` tokens an event."""
    made, ids = parser(request), tokens(text)
    pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
    deltas = [
        made.parse_delta("", piece, request, [], finished=piece is pieces[-1]) for piece in pieces
    ]
    there = [delta for delta in deltas if delta is not None]
    assert all(delta.reasoning or delta.content or delta.tool_calls for delta in there)
    calls = [call for delta in there for call in delta.tool_calls if call.function.name]
    return (
        "".join(delta.reasoning or "" for delta in there),
        "".join(delta.content or "" for delta in there),
        len(calls),
    )


THOUGHT = "<|channel|>analysis<|message|>Say it.<|end|>"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (f"{THOUGHT}{FINAL}One. Two.", ["Two."], ("Say it.", "One. ")),
        # The last token goes on behind the stop string, or holds it twice.
        (f"{THOUGHT}{FINAL}One\n\n", "\n", ("Say it.", "One")),
        (f"{THOUGHT}{FINAL}One\n\n", ["One\n\n", "\n"], ("Say it.", "One")),
        (f"{THOUGHT}{FINAL}One. Two", ["T"], ("Say it.", "One. ")),
        # The answer goes on behind what was one before `min_tokens`.
        (f"{THOUGHT}{FINAL}One\n\nTwo", "\n\n", ("Say it.", "One\n\nTwo")),
        (f"{THOUGHT}{FINAL}One\n\n", ["x", "\n\n"], ("Say it.", "One")),
        (f"{THOUGHT}{FINAL}One END", ["ENDED"], ("Say it.", "One END")),
        (f"{THOUGHT}{FINAL}Two.", ["Two."], ("Say it.", "")),
        ("<|channel|>analysis<|message|>Say STOP", ["STOP"], ("Say ", "")),
        (f"<|channel|>analysis<|message|>A STO<|end|>{FINAL}B", ["STOP"], ("A STO", "B")),
        (f"{THOUGHT}{FINAL}One", None, ("Say it.", "One")),
        # The same, and the model ends it.
        (f"{THOUGHT}{FINAL}One\nYes<|return|>", "\n", ("Say it.", "One\nYes")),
        (f"{THOUGHT}{FINAL}Grüße, \U0001f600", "\U0001f600", ("Say it.", "Grüße, ")),
    ],
)
def test_answers_end_before_their_stop_string(
    text: str, stop: Any, expected: tuple[str, str], size: int
) -> None:
    """The fault: vLLM cuts it off the text, and this format is read by tokens."""
    request = chat(stop=stop)
    reasoning, content, calls = whole(text, request)
    assert (reasoning or "", content or "", calls) == (*expected, None)
    assert streamed(text, request, size) == (*expected, 0)


def test_a_stop_string_that_is_asked_for_stays() -> None:
    text, request = f"{FINAL}One END", chat(stop=["END"], include_stop_str_in_output=True)
    assert whole(text, request)[1] == "One END"
    assert streamed(text, request, 1)[1] == "One END"


def test_what_is_held_back_of_a_message_comes_before_the_next_one() -> None:
    """Catches: reasoning within a call, for which a stream of Messages closes the call."""
    request = chat(tools=[FUNCTION], stop=["it.\n\nHuman:"])
    made, ids = parser(request), tokens(THOUGHT + CALL)
    fields = []
    for token in ids:
        delta = made.parse_delta("", [token], request, [], finished=token is ids[-1])
        if delta is not None:
            fields += sorted(delta.model_fields_set)
    first_call = fields.index("tool_calls")
    assert set(fields[:first_call]) == {"reasoning"} and set(fields[first_call:]) == {"tool_calls"}


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>", ("", "")),
        ("<|channel|>analysis", ("", "")),
        ("<|return|>", ("", "")),
        (f"{THOUGHT}<|start|>assistant<|channel|>final", ("Say it.", "")),
        (f"{THOUGHT}<|start|>assistant to=functions.f<|channel|>commentary", ("Say it.", "")),
        ("A model that writes no headers.", ("", "A model that writes no headers.")),
    ],
)
def test_what_is_cut_within_a_header_has_no_markup_in_its_text(
    text: str, expected: tuple[str, str], size: int
) -> None:
    """The fault: with `max_tokens` 1 the answer was `<|channel|>`."""
    request = chat(tools=[FUNCTION])
    assert streamed(text, request, size) == (*expected, 0)
    reasoning, content, calls = whole(text, request)
    assert (reasoning or "", content or "", calls) == (*expected, None)


@pytest.mark.parametrize(
    ("given", "model_type", "expected"),
    [
        ({}, "gpt_oss", ("openai", "openai_gptoss")),
        ({"reasoning_parser": "openai_gptoss"}, "gpt_oss", ("openai", "openai_gptoss")),
        ({"tool_call_parser": "hermes"}, "qwen3", ("hermes", "")),
        ({}, "llama", (None, "")),
    ],
)
def test_the_format_has_its_parsers_without_being_told(
    given: dict[str, str], model_type: str, expected: tuple[str | None, str]
) -> None:
    """The fault: chats came with markup, calls were text, and Responses answered with a 500."""
    parsing = _parsing(load({"model": "org/model", **given}, {}), model_type)
    assert (parsing["tool_parser"], parsing["reasoning_parser"]) == expected
    assert parsing["enable_auto_tools"] is (expected[0] is not None)


def test_reasoning_of_the_format_has_no_bound() -> None:
    """Its parser has no strings for where reasoning begins and ends. A budget of Messages is left
    out then; it was refused by a field that nobody had sent."""
    off, on = SimpleNamespace(enabled=False), SimpleNamespace(enabled=True)
    for config, expected in ((None, False), (off, False), (on, True)):
        engine = SimpleNamespace(vllm_config=SimpleNamespace(reasoning_config=config))
        assert bounds_reasoning(engine) is expected


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_without_a_choice_of_tools_there_are_no_calls(choice: str) -> None:
    request = chat(tools=[FUNCTION], tool_choice=choice)
    assert streamed(THOUGHT + CALL, request, 3)[2] == (choice == "auto")


class Harmony(Renderer):
    """A renderer of such a model, without its weights and tokenizer."""

    def __init__(self, length: int = 1000) -> None:
        self.use_harmony = self.exclude_tools_when_tool_choice_none = True
        self.supports_browsing = self.supports_code_interpreter = False
        self.parser = PARSER
        self.default_chat_template_kwargs = {}
        self.model_config = SimpleNamespace(  # type: ignore[assignment]
            max_model_len=length, encoder_config=None, is_encoder_decoder=False
        )
        self.renderer = SimpleNamespace(  # type: ignore[assignment]
            tokenizer=TOKENIZER, get_tokenizer=lambda: TOKENIZER
        )


def prompt_of(request: ChatCompletionRequest, **given: Any) -> list[int]:
    _, (prompt,) = Harmony(**given)._make_request_with_harmony(request)
    ids: list[int] = prompt["prompt_token_ids"]
    return ids


def test_prompts_are_cut_where_that_is_asked_for() -> None:
    long = [{"role": "user", "content": "word " * 50}]
    whole_prompt = prompt_of(chat(messages=long))
    assert prompt_of(chat(messages=long, truncate_prompt_tokens=20)) == whole_prompt[-20:]
    assert (
        len(prompt_of(chat(messages=long, truncate_prompt_tokens=-1, max_tokens=8), length=60))
        <= 60
    )


BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": '{"a'}]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def test_an_answer_that_was_begun_is_continued() -> None:
    """The fault: a second answer came behind the first, for clients that join both."""
    request = chat(messages=BEGUN, **OPEN)
    prompt = prompt_of(request)
    assert get_encoding().decode(prompt).endswith('<|channel|>final<|message|>{"a')
    made, rest = parser(request), tokens('": 1}')
    made.set_prompt_token_ids(prompt)
    assert made.parse("", request, True, rest) == (None, '": 1}', None)
    made = parser(request)
    deltas = [
        made.parse_delta("", [token], request, prompt, finished=token is rest[-1]) for token in rest
    ]
    assert "".join(delta.content for delta in deltas if delta is not None) == '": 1}'


def test_other_answers_begin_with_their_channel_whatever_is_said_of_the_prompt() -> None:
    request = chat()
    made = parser(request)
    made.set_prompt_token_ids(prompt_of(request))
    assert made.parse("", request, True, tokens(THOUGHT + FINAL + "x")) == ("Say it.", "x", None)


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "reasoning": "Let me"},
        {"role": "user", "content": "And"},
    ],
)
def test_what_is_no_answer_of_the_assistant_is_not_continued(last: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match="can continue only") as refused:
        prompt_of(chat(messages=[*BEGUN[:1], last], **OPEN))
    assert refused.value.parameter == "messages"


def test_an_answer_that_is_held_to_a_format_is_not_continued() -> None:
    """Its grammar begins with the header of a message, which would be text there."""
    request = chat(messages=BEGUN, **OPEN, response_format={"type": "json_object"})
    renderer = Harmony()
    renderer.adjust_harmony_request(request)
    with pytest.raises(VLLMValidationError, match="held to a format") as refused:
        renderer._make_request_with_harmony(request)
    assert refused.value.parameter == "messages"


def test_an_effort_of_messages_is_refused_by_the_name_that_was_sent() -> None:
    """The fault: vLLM refuses the `reasoning_effort` of the chat that it makes of the messages."""
    message = {"role": "user", "content": "hi"}
    body = {"model": "m", "max_tokens": 9, "messages": [message]}
    body["output_config"] = {"effort": "xhigh"}
    request = MessagesServing.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body)
    )
    with pytest.raises(VLLMValidationError) as refused:
        Harmony()._make_request_with_harmony(request)
    (endpoint,) = (each for each in declared() if each.name == "messages")
    error = from_exception(refused.value, body, "messages", endpoint.names_in_errors)
    assert error.param == "output_config.effort"
    assert error.message.startswith("output_config.effort='xhigh' is not supported")


TOOL = {"type": "function", "name": "frobnicate", "parameters": {"type": "object"}}


def responses(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "hi", **fields})


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"stop": ["END"]}, "stop"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"reasoning": {"effort": "minimal"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "none"}}, "reasoning.effort"),
        ({"tools": [TOOL, {"type": "custom", "name": "c"}]}, "tools[1].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "description": "", "tools": [TOOL]}]},
            "tools[0].type",
        ),
        ({"chat_template_kwargs": {"enable": False}}, "chat_template_kwargs.enable"),
        (
            {"chat_template_kwargs": {"reasoning_effort": []}},
            "chat_template_kwargs.reasoning_effort",
        ),
    ],
)  # fmt: skip
def test_what_responses_would_pass_over_is_refused(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        rendered(responses(**fields))
    assert refused.value.parameter == parameter


def rendered(request: ResponsesRequest, **defaults: Any) -> str:
    renderer = Harmony()
    renderer.default_chat_template_kwargs = defaults
    result = renderer._render_responses_with_harmony(
        request, previous_messages=None, previous_response_outputs=None, tool_server=None
    )
    return str(get_encoding().decode(result.engine_input["prompt_token_ids"]))


@pytest.mark.parametrize(
    ("field", "given", "default", "expected"),
    [
        (None, None, None, "medium"),
        (None, "high", "low", "high"),
        (None, None, "low", "low"),
        ("low", "high", None, "low"),
        (None, None, "max", "medium"),  # of which the log warns at the start
    ],
)
def test_the_level_of_reasoning_is_read_in_template_arguments_too(
    field: str | None, given: str | None, default: str | None, expected: str
) -> None:
    """Catches: a level that chats and Responses pass over without a word."""
    defaults = {"reasoning_effort": default}
    fields: dict[str, Any] = {"chat_template_kwargs": {"reasoning_effort": given}} if given else {}
    request = responses(**fields, reasoning={"effort": field} if field else None)
    sent = request.reasoning
    assert f"Reasoning: {expected}" in rendered(request, **defaults)
    assert request.reasoning is sent  # the answer repeats it
    renderer = Harmony()
    renderer.default_chat_template_kwargs = defaults
    _, (prompt,) = renderer._make_request_with_harmony(chat(**fields, reasoning_effort=field))
    assert f"Reasoning: {expected}" in get_encoding().decode(prompt["prompt_token_ids"])


def test_the_log_names_template_arguments_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_unread({"reasoning_effort": "high"})
    assert not caplog.messages
    _warn_of_unread({"reasoning_effort": "max", "enable_thinking": False})
    assert "max" in caplog.text and "enable_thinking" in caplog.text


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_chats_would_pass_over_is_refused(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        prompt_of(chat(**fields))
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "name"), [({"top_logprobs": 2}, "top_logprobs"), ({}, "include")]
)
def test_log_probabilities_are_refused_by_the_name_that_was_sent(
    fields: dict[str, Any], name: str
) -> None:
    """The fault: an error about `logprobs`, which Responses do not have."""
    serving: Any = ResponsesServing.__new__(ResponsesServing)
    serving.use_harmony = True
    request = responses(include=["message.output_text.logprobs"], **fields)
    with pytest.raises(VLLMValidationError) as refused:
        serving._validate_create_responses_input(request)
    assert refused.value.parameter == name
    assert asyncio.run(_counted(serving, request)) == name


async def _counted(serving: Any, request: ResponsesRequest) -> str | None:
    """The field for which a count of the request's tokens is refused."""

    async def known(request: Any) -> None:
        """The model's name is right."""

    serving._check_model = known
    with pytest.raises(VLLMValidationError) as refused:
        await serving.count_input_tokens(request)
    return refused.value.parameter


def test_text_in_front_of_a_call_is_no_answer() -> None:
    """The fault: all reasoning before it was left out, and it was an answer that ended the turn."""
    thought = {"type": "reasoning", "id": "r", "summary": []}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Two?"},
        {**thought, "content": [{"type": "reasoning_text", "text": "Ask it."}]},
        {"role": "assistant", "content": "I look."},
        {**thought, "content": [{"type": "reasoning_text", "text": "Now."}]},
        called,
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    text = rendered(responses(input=items))
    assert "<|channel|>analysis<|message|>Ask it.<|end|>" in text
    assert "<|channel|>commentary<|message|>I look.<|end|>" in text
    assert "<|channel|>final<|message|>One.<|end|>" in text
    ended = rendered(responses(input=[*items, {"role": "assistant", "content": "Two."}]))
    assert "<|channel|>final<|message|>Two." in ended and "Ask it." not in ended


def test_the_tokens_of_messages_are_those_of_the_chat() -> None:
    """The fault: POST /tokenize counted the prompt of the chat template, which no chat has."""
    turns = [*BEGUN, {"role": "user", "content": "f?"}]
    for fields in (
        {"messages": turns},
        {"messages": turns, "tools": [FUNCTION]},
        {"messages": turns, "chat_template_kwargs": {"reasoning_effort": "low"}},
        {"messages": BEGUN, **OPEN},
    ):
        request = TokenizeMessagesRequest.model_validate(fields)
        made = Harmony().preprocess_chat(request, request.messages, tool_dicts=None)
        _, (prompt,) = asyncio.run(made)
        harmony = Harmony()
        asked = chat(**fields)
        _, (expected,) = harmony._make_request_with_harmony(asked, asked.tools is not None)
        assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]


def test_an_incomplete_message_in_responses_is_continued() -> None:
    message = {
        "type": "message", "role": "assistant", "id": "1", "status": "incomplete",
        "content": [{"type": "output_text", "text": '{"a', "annotations": []}],
    }  # fmt: skip
    text = rendered(responses(input=[{"role": "user", "content": "hi"}, message]))
    assert text.endswith('<|channel|>final<|message|>{"a')


def test_responses_that_choose_no_tool_are_told_of_none() -> None:
    for choice in ("auto", "none"):
        request = responses(tools=[TOOL], tool_choice=choice)
        assert ("frobnicate" in rendered(request)) is (choice == "auto")
        assert len(request.tools) == 1  # the answer repeats them


def test_a_streamed_call_can_be_sent_back() -> None:
    """The fault: vLLM writes fields of the event into the item, which no input takes."""
    item = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    event = {
        "type": "response.output_item.done", "output_index": 1, "sequence_number": 7,
        "item": {**item, "output_index": 1, "sequence_number": -1},
    }  # fmt: skip
    assert published_event(event) == {**event, "item": item}
