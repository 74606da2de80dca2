"""vLLM's errors become OpenAI's."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import QueueOverflowError, VLLMNotFoundError, VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from app.errors import ApiError
from app.llm.vllm_errors import ConstraintError, from_exception, from_parsing, from_response
from app.serving.request_models import ChatRequest, TextRequest


def test_a_named_parameter_is_kept_and_its_suffix_dropped() -> None:
    error = from_exception(
        VLLMValidationError("bad top_p", parameter="top_p", value=2.0), {"top_p": 2.0}, "prompt"
    )
    assert (error.status, error.param, error.message) == (400, "top_p", "bad top_p")


def test_an_unnamed_parameter_is_found_in_the_message() -> None:
    """vLLM's message names two fields; the one that was sent is the culprit."""
    message = "The min_p and logit_bias sampling parameters are not yet supported."
    error = from_exception(VLLMValidationError(message), {"logit_bias": {"5": 1}}, "messages")
    assert error.param == "logit_bias"


@pytest.mark.parametrize(
    ("parameter", "sent", "param", "named"),
    [
        ("effort_of_chats", {"config": {}, "user": "me"}, "config.effort", "config.effort is bad"),
        (None, {"config": {}}, "config", "config.effort is bad"),
        ("effort_of_chats", {"effort_of_chats": 1, "config": {}}, "effort_of_chats", None),
        ("effort_of_chats", {"user": "me"}, None, None),
        ("input_text", {"messages": []}, "messages", None),
    ],
)
def test_a_field_has_the_name_with_which_it_was_sent(
    parameter: str | None, sent: dict[str, object], param: str | None, named: str | None
) -> None:
    message = "effort_of_chats is bad for a user"
    names = {"effort_of_chats": "config.effort"}
    raised = VLLMValidationError(message, parameter=parameter)
    error = from_exception(raised, sent, "messages", names)
    assert (error.param, error.message) == (param, f"{named} for a user" if named else message)
    returned = ErrorResponse(
        error=ErrorInfo(message=message, type="BadRequestError", param=parameter, code=400)
    )
    assert from_response(returned, sent, "messages", names).envelope() == error.envelope()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Constraints exclude tools of a user.", None),
        ("Set `stream` for a user.", "stream"),
        ("'user' may not be empty.", "user"),
        ("The prompt of a user is empty.", "prompt"),
        ("It's no user's max_tokens.", "max_tokens"),
    ],
)
def test_words_of_english_are_no_fields(message: str, param: str | None) -> None:
    sent = dict.fromkeys(("user", "tools", "stream", "max_tokens", "prompt"), 1)
    assert from_exception(VLLMValidationError(message), sent, "prompt").param == param


def test_a_template_names_no_field() -> None:
    """Catches: the field `user` for a template that wants roles to alternate user/assistant."""
    sent = {"user": "me", "tools": [], "messages": [], "chat_template_kwargs": {}}
    for text in ("Roles must alternate user/assistant.", "No 'tools' in chat_template_kwargs."):
        refused = TemplateError(text)
        wrapped = VLLMValidationError(text)
        wrapped.__cause__ = refused
        for error in (refused, wrapped):
            found = from_exception(error, sent, "messages")
            assert (found.status, found.message, found.param) == (400, text, None)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 9000.",
        "The engine prompt length 9000 exceeds the max_model_len 2048. Please reduce prompt.",
    ],
)
def test_over_long_prompts_have_openais_code(message: str) -> None:
    error = from_exception(ValueError(message), {}, "messages")
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("param", ["max_tokens", "truncate_prompt_tokens"])
def test_a_limit_that_is_too_large_is_no_long_prompt(param: str) -> None:
    """A client that is told of an over-long prompt shortens its conversation, for ever here."""
    message = f"{param}=100000 cannot be greater than max_model_len=512."
    error = from_exception(VLLMValidationError(message, parameter=param), {param: 1}, "messages")
    assert (error.status, error.code, error.param) == (400, None, param)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("No. Start the server with --trust-request-mm-kwargs.", "No."),
        (
            "At most 64. To increase it, set VLLM_MAX_N_SEQUENCES.",
            "At most 64.",
        ),
        ("Too long. Raise --max-model-len.", "Too long. Raise --max-model-len."),
        ("A non-existent--thing is wrong.", "A non-existent--thing is wrong."),
    ],
)
def test_advice_is_about_this_product(message: str, expected: str) -> None:
    assert from_exception(VLLMValidationError(message), {}, "prompt").message == expected


def test_an_error_that_is_advice_alone_says_what_is_wrong() -> None:
    error = from_exception(VLLMValidationError('"auto" requires --x-y to be set'), {}, "prompt")
    assert "--" not in error.message
    assert "not set up" in error.message


def test_returned_errors_keep_their_status() -> None:
    response = ErrorResponse(
        error=ErrorInfo(message="no such model", type="NotFoundError", param="model", code=404)
    )
    error = from_response(response, {}, "prompt")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert from_exception(VLLMNotFoundError("gone"), {}, "prompt").status == 404


def test_an_error_wrapped_by_the_engine_is_unwrapped() -> None:
    """AsyncLLM wraps a bare ValueError in EngineGenerateError: a 500 for the client's mistake."""
    wrapped = EngineGenerateError()
    wrapped.__cause__ = ValueError("bad grammar")
    assert from_exception(wrapped, {}, "prompt").status == 400


def test_the_engines_own_failures_are_5xx_and_say_nothing_inside() -> None:
    assert from_exception(EngineDeadError(), {}, "prompt").status == 503
    overflow = from_exception(QueueOverflowError(), {}, "prompt")
    assert (overflow.status, overflow.headers) == (503, {"Retry-After": "1"})
    broken = from_exception(KeyError("/secret/path"), {}, "prompt")
    assert broken.status == 500
    assert "secret" not in broken.message


def test_pydantic_errors_point_at_the_field() -> None:
    payload = {"messages": [{"role": "user", "content": "x"}], "seed": "abc"}
    with pytest.raises(ValueError, match="seed") as caught:
        ChatRequest.model_validate(payload)
    assert from_exception(caught.value, payload, "messages").param == "seed"


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, IndexError, AssertionError])
def test_a_request_model_that_breaks_blames_the_request_and_says_nothing_inside(
    error: type[Exception],
) -> None:
    """A validator of vLLM's may look into a field before its type is known."""
    found = from_parsing(error("'float' object is not iterable"), {"tools": 5}, "messages")
    assert found.status == 400
    assert "float" not in found.message


def test_a_validator_of_the_whole_body_is_a_400_that_names_a_field() -> None:
    """Its error has no place."""
    payload = {
        "model": "m",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
    }
    with pytest.raises(ValidationError) as raised:
        AnthropicMessagesRequest.model_validate(payload)
    found = from_parsing(raised.value, payload, "messages")
    assert (found.status, found.param) == (400, "thinking")
    assert "budget_tokens" in found.message


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"prompt": {"text": "x"}}, "prompt"),  # the branches of its union are no fields
        ({"prompt": [{"text": "x"}]}, "prompt[0]"),
        ({"prompt": "x", "temperature": "warm"}, "temperature"),
    ],
)
def test_the_place_of_a_wrong_type_is_one_of_the_request(
    payload: dict[str, object], param: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        TextRequest.model_validate({"model": "m", **payload})
    assert from_parsing(raised.value, payload, "prompt").param == param


def test_pythons_own_words_are_not_told() -> None:
    found = from_exception(TypeError("object of type 'int' has no len()"), {}, "prompt")
    assert (found.status, "len" in found.message) == (400, False)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "text", "tools"])
def test_a_constraint_that_is_no_good_is_named(field: str) -> None:
    """vLLM turns every such field into one constraint, whose errors do not say which it was."""
    payload = {"response_format": None, field: {"type": "x"}}
    assert from_exception(ConstraintError("empty"), payload, "prompt").param == field
    with pytest.raises(Exception, match="one kind") as caught:
        StructuredOutputsParams(regex="a", choice=["a"])
    assert from_exception(caught.value, payload, "prompt").param == field


def test_our_own_errors_pass_through() -> None:
    error = ApiError(418, "teapot")
    assert from_exception(error, {}, "prompt") is error
