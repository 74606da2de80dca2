"""An endpoint served by one engine: JSON object in, answer out, errors as ApiError."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from app.declaration.endpoint import Endpoint, Payload
from app.declaration.null_fields import drop_null_fields
from app.errors import ApiError
from app.llm import vllm_errors
from app.llm.first_token import FirstToken, watch_first_token
from app.offload import run_sized
from app.request_usage import current_answer_bytes, current_usage
from app.serving.events import events
from app.validation.output_limit import OutputLimit

Answer = dict[str, Any] | AsyncIterator[str]


@dataclass(frozen=True)
class Reply:
    """An operation's result. `first` tells when a stream's first token exists."""

    answer: Answer
    first: FirstToken


@dataclass(frozen=True)
class Operation:
    """One endpoint on one engine: how a body is checked and parsed, and what answers it."""

    endpoint: Endpoint
    parse: Callable[[Payload], BaseModel]
    call: Callable[[Any], Awaitable[Any]]
    check: Callable[[Payload], None]
    lost: Callable[[], bool] = lambda: False  # whether the engine is dead
    # Whether the chat template fails with this message for a plain user message, too.
    template_fails: Callable[[str], bool] = lambda message: False
    output_limit: OutputLimit = field(default_factory=OutputLimit)

    async def __call__(self, payload: Payload, size: int = 0) -> Reply:
        """Answer one request, whose body had `size` bytes. Drops the null fields inside of
        `payload`.

        Raises ApiError; never returns an error as an answer.
        """
        first = watch_first_token()
        fields = dict(payload)  # checks drop and rename fields; errors name them as sent
        try:
            request = await run_sized(size, self._checked, fields)
            self._note_repeats(fields, size)
            result = await self.call(request)
        except Exception as error:
            raise self._error(first.error or error, payload, first) from error
        if isinstance(result, ErrorResponse):
            raise self._error(first.error or result, payload, first)
        if isinstance(result, BaseModel):
            size = current_answer_bytes()
            return Reply(await run_sized(size, self.endpoint.answers.body, result), first)

        def to_error(error: BaseException | ErrorResponse) -> ApiError:
            if not first.settled and isinstance(error, BaseException):
                raise error  # nothing has been sent yet: it becomes the response's status
            # What came before the first token is known as it was raised; vLLM's event only quotes
            # it, so that a client's mistake would be taken for a failure of the server.
            return self._error(first.error or error, payload, first)

        options = fields.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        stream = events(result, self.endpoint.answers, to_error, null_usage=usage)
        return Reply(stream, first)

    def _checked(self, payload: Payload) -> BaseModel:
        drop_null_fields(payload)
        self.check(payload)
        try:
            return self.parse(payload)
        except Exception as error:
            raise vllm_errors.from_parsing(error, payload, self.endpoint.prompt) from error

    def _note_repeats(self, payload: Payload, size: int) -> None:
        """Note in the request's usage what of a checked body its answer will repeat."""
        usage = current_usage()
        if usage is None:
            return
        usage.returns_token_ids = payload.get("return_token_ids") is True
        usage.repeats_prompts = self.endpoint.scores_prompts and (
            usage.returns_token_ids or payload.get("echo") is True
        )
        if self.endpoint.echoes_tools and payload.get("tools"):
            usage.echoed_bytes = size

    def failure(self, error: BaseException, payload: Payload, first: FirstToken) -> ApiError:
        """The ApiError for an error that came while a stream was awaited."""
        return self._error(error, payload, first)

    def event(self, error: ApiError, sequence_number: int) -> str:
        """The error as an event, for a stream that the gateway ends itself."""
        return self.endpoint.answers.error_event(error, sequence_number)

    def _error(
        self, error: BaseException | ErrorResponse, payload: Payload, first: FirstToken
    ) -> ApiError:
        """The ApiError for an error of vLLM.

        Once the engine has begun to answer, the request was valid: a later error is the server's,
        even if it looks like a client's. On a dead engine any error means that it was lost.
        """
        if self.lost():
            return vllm_errors.engine_lost()
        # Except where a grammar allows no next token, and for errors that have a code of their own.
        if isinstance(first.late, vllm_errors.ConstraintError | vllm_errors.NonFiniteError):
            return vllm_errors.from_exception(first.late, payload, self.endpoint.prompt)
        if first.answered:
            return vllm_errors.internal(error)
        named = self.endpoint.prompt, self.endpoint.names_in_errors
        if isinstance(error, ErrorResponse):
            api_error = vllm_errors.from_response(error, payload, *named)
        else:
            api_error = vllm_errors.from_exception(error, payload, *named)
        return vllm_errors.chat_template() if self.template_fails(api_error.message) else api_error
