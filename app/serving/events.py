"""Server-sent event texts from what vLLM's serving classes stream.

They stream ready-made texts, or pydantic objects for Responses. An error that comes after
the first token can only be an event: it gets the envelope of the operation's API.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from app.errors import ApiError
from app.serving.null_fields import with_streamed_required_nulls, without_streamed_nulls
from app.serving.response_fields import published_event

_ERROR = 'data: {"error":'
_ANTHROPIC_ERROR = "event: error\n"
_MESSAGE_START = "event: message_start\n"
# What ids of answers begin with: vLLM's Messages are chats inside.
CHAT_ID, MESSAGE_ID = "chatcmpl-", "msg_"
# Operations whose schema has few nullable fields; Anthropic's and Responses' want their nulls.
_FEW_NULLS = ("chat", "completions")

ToError = Callable[[BaseException | ErrorResponse], ApiError]


async def events(
    stream: AsyncGenerator[Any, None],
    operation: str,
    to_error: ToError,
    *,
    null_usage: bool = False,
) -> AsyncGenerator[str, None]:
    """The stream as event texts. `to_error` raises what must not become an event. With
    `null_usage`, chunks without usage say so."""
    sent = 0
    if operation == "responses":
        stream = _with_cut_marked(stream)
    try:
        async for item in stream:
            text = _text(item, operation, to_error)
            if operation in _FEW_NULLS and not text.startswith(_ERROR):
                text = with_streamed_required_nulls(text, usage=null_usage)
            yield text
            sent += 1
    except Exception as broken:
        yield error_event(to_error(broken), operation, sent)
    finally:
        await stream.aclose()


async def _with_cut_marked(stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Events of Responses, with the item that the token limit cut as `incomplete`: vLLM calls
    each item completed. The end of an item waits for the next event, which comes at once."""
    done = None
    try:
        async for item in stream:
            if done is not None:
                if item.type == "response.completed":
                    mark_cut(item.response.status, [done.item])
                    mark_cut(item.response.status, item.response.output)
                yield done
                done = None
            if item.type == "response.output_item.done":
                done = item
            else:
                yield item
    except Exception:
        if done is not None:
            yield done
        raise
    finally:
        await stream.aclose()


def mark_cut(status: str, output: Sequence[Any]) -> None:
    """Say of a cut response's last item that it is incomplete."""
    if status == "incomplete" and output and hasattr(output[-1], "status"):
        output[-1].status = "incomplete"


def _text(item: Any, operation: str, to_error: ToError) -> str:
    if not isinstance(item, str):
        return _framed(item)
    if item.startswith(_ERROR):
        response = ErrorResponse.model_validate_json(item.removeprefix("data:"))
        return error_event(to_error(response), operation)
    if item.startswith(_ANTHROPIC_ERROR):  # it quotes whatever broke inside vLLM
        return error_event(to_error(RuntimeError(item)), operation)
    if operation == "messages" and item.startswith(_MESSAGE_START):
        return item.replace(f'"id":"{CHAT_ID}', f'"id":"{MESSAGE_ID}', 1)
    return without_streamed_nulls(item) if operation in _FEW_NULLS else item


def _framed(item: Any) -> str:
    """An event object of Responses. vLLM calls an answer that was cut completed, too."""
    kind, data = item.type, item.model_dump_json(by_alias=True)
    if kind == "response.completed" and item.response.status == "incomplete":
        kind = "response.incomplete"
    if any(hasattr(item, field) for field in ("response", "item", "part")):
        data = json.dumps({**published_event(json.loads(data)), "type": kind})
    return f"event: {kind}\ndata: {data}\n\n"


def error_event(error: ApiError, operation: str, sequence_number: int = 0) -> str:
    """An error inside a stream, as the operation's API writes it."""
    if operation == "messages":
        inner = {"type": "api_error", "message": error.message}
        return f"event: error\ndata: {json.dumps({'type': 'error', 'error': inner})}\n\n"
    if operation == "responses":
        body: dict[str, Any] = {"type": "error", "code": error.code or error.type}
        body |= {"message": error.message, "param": error.param}
        body |= {"sequence_number": sequence_number}
        return f"event: error\ndata: {json.dumps(body)}\n\n"
    return f"data: {json.dumps(error.envelope())}\n\n"
