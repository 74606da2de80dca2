"""Maps vLLM's errors to ApiError: every way in which a serving class can refuse or break."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMValidationError,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from app.errors import NO_RETRY, ApiError
from app.settings import section_of

logger = logging.getLogger(__name__)

_CONTEXT_LENGTH = re.compile(r"maximum (context|model) length|max_model_len|longer than the max")
_PARAMETER_SUFFIX = re.compile(r" \(parameter=.*\)$", re.DOTALL)
# A request's own mistake that vLLM reports with a bare Python error.
_CLIENT_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OverflowError,
    NotImplementedError,
    RecursionError,
)
# Fields that constrain the output. vLLM turns each into the same internal constraint, whose errors
# do not name the field.
_CONSTRAINTS = ("response_format", "structured_outputs", "text", "output_config", "tools")
_CONSTRAINT_CHECKS = {
    SamplingParams._validate_structured_outputs.__code__,
    StructuredOutputsParams.__post_init__.__code__,
}
# A quote, if there is one, and a name or the path of an inner field.
_WORD = re.compile(r"([`'\"]?)\b([a-z_]+(?:\.[a-z_]+)*)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NOT_SET_UP = "The request asks for something that this server is not set up for."
_TAGS = ("type", "role")  # fields that tell the branches of a union apart
_WRONG_TYPE = "A field of the request, or something inside it, has a value of the wrong type."
# vLLM's names for the prompt, in errors about its length. An error that names another field is
# about that one: an output limit beyond the model's context does not make a prompt too long.
_PROMPTS = ("input_text", "input_tokens", "prompt")
# vLLM's words for a prompt that is as long as the context. It is the only limit of 0 that gets so
# far: check_generation (app/validation/field_checks.py) refuses those of clients.
_NO_ROOM = "max_tokens must be at least 1, got 0."
PROMPT_FILLS_CONTEXT = (
    "The prompt alone has this model's maximum context length, which leaves no token for the "
    "output. Please reduce the length of the input prompt."
)
# Names of fields in vLLM's errors -> what the API of a request calls them. vLLM makes a chat of a
# request of another API, and gives a field that has two names one of them.
Names = Mapping[str, str]
NO_NAMES: Names = {}


class ConstraintError(VLLMValidationError):
    """The engine could not compile what the request constrains its output to."""


class NonFiniteError(GenerationError):
    """The model's logits for the request have NaN or infinity among them."""


def from_response(
    response: ErrorResponse, payload: Mapping[str, Any], prompt: str, names: Names = NO_NAMES
) -> ApiError:
    """Map an error that a serving class returned. `prompt` is the field that holds the prompt,
    `names` the API's names of fields that vLLM's errors call otherwise."""
    error = response.error
    return _client_error(int(error.code), error.message, error.param, payload, prompt, names)


def from_parsing(error: Exception, payload: Mapping[str, Any], prompt: str) -> ApiError:
    """Map an error of a request model. It sees only the request, which is at fault in any case."""
    if isinstance(error, (ApiError, ValidationError, VLLMClientError, ValueError)):
        return from_exception(error, payload, prompt)
    logger.debug("a request model broke", exc_info=error)
    return ApiError(400, _WRONG_TYPE)


def from_exception(
    error: BaseException, payload: Mapping[str, Any], prompt: str, names: Names = NO_NAMES
) -> ApiError:
    """Map an error that a serving class or the engine raised. `names` as in `from_response`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, _CLIENT_ERRORS):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return _from_pydantic(error, payload, prompt)
    if isinstance(error, GracefulHTTPError):
        return ApiError(int(error.http_status), error.message, headers={"Retry-After": "1"})
    if isinstance(error, VLLMNotFoundError):
        return _client_error(404, str(error), "model", payload, prompt, names)
    if isinstance(error, TypeError) and not isinstance(error, VLLMClientError):
        return ApiError(400, _WRONG_TYPE)  # what it says is about Python, not about the request
    by_template = any(map(_is_template_error, _causes(error)))
    if isinstance(error, (VLLMClientError, *_CLIENT_ERRORS)) or by_template:
        param = error.parameter if isinstance(error, VLLMValidationError) else None
        if param is None and _about_constraint(error):
            param = next((name for name in _CONSTRAINTS if payload.get(name) is not None), None)
        if by_template:
            payload = {}  # the words of a template's author name no fields
        return _client_error(400, str(error), param, payload, prompt, names)
    return internal(error)


def internal(error: BaseException | ErrorResponse) -> ApiError:
    """Map a failure that is not the request's. The log gets all of it, the client a sentence."""
    if isinstance(error, EngineDeadError):
        return engine_lost()
    if isinstance(error, NonFiniteError):
        return non_finite()
    if isinstance(error, ErrorResponse):
        logger.error("request failed: %s", error.error.message)
    else:
        logger.error("request failed", exc_info=error)
    return ApiError(500, "The server had an error while processing your request.")


def engine_lost() -> ApiError:
    """The 503 of a request whose engine died."""
    message = "The engine stopped while it worked on this request; try again."
    return ApiError(503, message, code="engine_lost", headers={"Retry-After": "10"})


def non_finite() -> ApiError:
    """The 500 of a request for which the model computed NaN or infinity."""
    message = "The model computed values that are not finite for this request; it was ended."
    return ApiError(500, message, code="non_finite_output", headers=dict(NO_RETRY))


def chat_template() -> ApiError:
    """The 500 of a chat template that fails for every request; the log said at start-up how."""
    message = "The model's chat template fails, for a plain user message as well."
    return ApiError(500, message, headers=dict(NO_RETRY))


def _about_constraint(error: BaseException) -> bool:
    """Whether the error comes from vLLM's check of what constrains the output."""
    return isinstance(error, ConstraintError) or any(
        frame.f_code in _CONSTRAINT_CHECKS
        for cause in _causes(error)
        for frame, _ in traceback.walk_tb(cause.__traceback__)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _client_error(
    status: int,
    message: str,
    param: str | None,
    payload: Mapping[str, Any],
    prompt: str,
    names: Names,
) -> ApiError:
    message = _own_words(sanitize_message(_PARAMETER_SUFFIX.sub("", message)))
    if status >= 500:
        return ApiError(status, message)
    if message == _NO_ROOM:
        message, param = PROMPT_FILLS_CONTEXT, prompt
    if _CONTEXT_LENGTH.search(message) and param in (None, prompt, *_PROMPTS):
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    if status == 404 and param == "model":
        return ApiError(404, message, param="model", code="model_not_found")
    names = {name: path for name, path in names.items() if name not in payload}
    message = _with_names_sent(message, payload, names)
    candidates = (param, prompt if param in _PROMPTS else names.get(param or ""))
    # vLLM names the field only sometimes; its message nearly always does.
    told = (name for name in candidates if name == prompt or _is_sent(name, payload))
    param = next(told, None)
    return ApiError(status, message, param=param or _named_field(message, payload, prompt))


def _is_sent(path: str | None, payload: Mapping[str, Any]) -> bool:
    """Whether the request has the field at the beginning of a path such as `tools[0].type`."""
    return path is not None and re.split(r"[.\[]", path, maxsplit=1)[0] in payload


def _with_names_sent(message: str, payload: Mapping[str, Any], names: Names) -> str:
    """The message with the names of the API's fields, where vLLM's words have others."""

    def in_api(word: re.Match[str]) -> str:
        quote, name = word.groups()
        return f"{quote}{names[name]}" if _is_sent(names.get(name), payload) else word[0]

    return _WORD.sub(in_api, message)


def _named_field(message: str, payload: Mapping[str, Any], prompt: str) -> str | None:
    """The first field of the request that the message mentions.

    A word alone is a name where it is quoted, has an underscore, leads to an inner field or is that
    of the `prompt`: "user" and "tools" are words of English too.
    """
    for quote, path in _WORD.findall(message):
        name = path.partition(".")[0]
        if name in payload and (quote or "_" in path or "." in path or name == prompt):
            return name
    return None


def _from_pydantic(error: ValidationError, payload: Mapping[str, Any], prompt: str) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    cause = problems[0].get("ctx", {}).get("error")
    if isinstance(cause, VLLMValidationError):
        message = _PARAMETER_SUFFIX.sub("", str(cause))
        param = cause.parameter or _named_field(message, payload, prompt)
        return ApiError(400, _own_words(sanitize_message(message)), param=param)
    if not problems[0]["loc"]:  # from a validator of the whole body
        message = _own_words(sanitize_message(str(cause or problems[0]["msg"])))
        return ApiError(400, message, param=_named_field(message, payload, prompt))
    problems = _decisive(problems, payload)
    param = _path(problems[0], payload)
    reasons = {p["msg"] for p in problems if _path(p, payload) == param}
    if problems[0]["type"] == "missing":
        return ApiError(
            400, f"Missing required parameter: '{param}'.", param=param, code="missing_parameter"
        )
    where = "" if param is None else f" for '{param}'"
    return ApiError(400, f"Invalid value{where}: {' or '.join(sorted(reasons)[:3])}.", param=param)


def _decisive(problems: list[ErrorDetails], payload: Mapping[str, Any]) -> list[ErrorDetails]:
    """The problems in the union branch that is meant: that with the data's `type` and `role`.

    Of these only the deepest are kept: they say the most.
    """
    tags = [problem for problem in problems if problem["loc"][-1] in _TAGS]
    others = {
        problem["loc"][:-1] for problem in tags if problem["type"] in ("literal_error", "missing")
    }
    meant = [
        problem
        for problem in problems
        if not any(problem["loc"][:end] in others for end in range(1, len(problem["loc"])))
    ]
    # A problem with a whole value says nothing if another branch looked inside of the value.
    inside = [_steps(problem, payload) for problem in tags]
    meant = [
        problem
        for problem in meant
        if not any(_begins(steps, _steps(problem, payload)) for steps in inside)
    ]
    if not meant:  # no branch has this tag: it is the tag that is wrong
        meant = [problem for problem in tags if problem["type"] == "literal_error"] or problems
    depths = [len(_steps(problem, payload)) for problem in meant]
    return [problem for problem, depth in zip(meant, depths, strict=True) if depth == max(depths)]


def _begins(steps: list[int | str], beginning: list[int | str]) -> bool:
    return len(beginning) < len(steps) and steps[: len(beginning)] == beginning


def _path(problem: ErrorDetails, payload: Any) -> str | None:
    """Where the problem is, as OpenAI writes it: `messages[0].role`."""
    path = ""
    for step in _steps(problem, payload):
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path = f"{path}.{step}" if path else step
    return path or None


def _steps(problem: ErrorDetails, payload: Any) -> list[int | str]:
    """Keys and indices that lead from the payload to the problem.

    Parts of pydantic's location that are no key of the data are names of union branches, except for
    the last one if a field is missing.
    """
    steps: list[int | str] = []
    value, loc = payload, problem["loc"]
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            steps.append(part)
            value = value[part]
        elif isinstance(part, str) and isinstance(value, Mapping):
            if part in value:
                steps.append(part)
                value = value[part]
            elif last and problem["type"] == "missing":
                steps.append(part)
    return steps


def _own_words(message: str) -> str:
    """The message without sentences about options and variables of vLLM that do not exist here."""
    sentences = _SENTENCE.split(message)
    kept = [sentence for sentence in sentences if not _names_foreign_settings(sentence)]
    return message if len(kept) == len(sentences) else " ".join(kept) or _NOT_SET_UP


def _names_foreign_settings(sentence: str) -> bool:
    options = {f"--{name.replace('_', '-')}" for name in section_of()}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", sentence))
    return bool(named - options) or re.search(r"\bVLLM_[A-Z]", sentence) is not None


def _is_template_error(error: BaseException) -> bool:
    """jinja2.TemplateError without importing jinja2: a chat template refused the messages."""
    return any(cls.__name__ == "TemplateError" for cls in type(error).__mro__)
