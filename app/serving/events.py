"""Server-sent event texts from what vLLM's serving classes stream.

They stream ready-made texts, or pydantic objects for Responses. An error that comes after
the first token can only be an event: it gets the envelope of the endpoint's API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from app.declaration.answers import AnswerFormat
from app.errors import ApiError
from app.offload import run_sized
from app.request_usage import current_answer_bytes

_ERROR = 'data: {"error":'
_ANTHROPIC_ERROR = "event: error\n"

ToError = Callable[[BaseException | ErrorResponse], ApiError]


async def events(
    stream: AsyncGenerator[Any, None],
    answers: AnswerFormat,
    to_error: ToError,
    *,
    null_usage: bool = False,
) -> AsyncGenerator[str, None]:
    """The stream as event texts.

    `to_error` maps an error, or raises it if it must not become an event. An error is the last
    event. With `null_usage`, chunks without usage have `"usage": null`.
    """
    sent = 0
    stream = answers.corrected(stream)
    try:
        async for item in stream:
            if (error := _error(item)) is not None:
                yield answers.error_event(to_error(error))
                return  # vLLM ends its streams of chunks with [DONE] all the same
            if answers.repeats_answer(item):
                write = partial(answers.event, item, null_usage=null_usage)
                yield await run_sized(current_answer_bytes(), write)
            else:
                yield answers.event(item, null_usage=null_usage)
            sent += 1
    except Exception as broken:
        yield answers.error_event(to_error(broken), sent)
    finally:
        await stream.aclose()


def _error(item: Any) -> BaseException | ErrorResponse | None:
    """The error that vLLM wrote as an event, if the item is one."""
    if not isinstance(item, str):
        return None
    if item.startswith(_ERROR):
        return ErrorResponse.model_validate_json(item.removeprefix("data:"))
    if item.startswith(_ANTHROPIC_ERROR):  # it quotes whatever broke inside vLLM
        return RuntimeError(item)
    return None
