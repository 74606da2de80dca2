"""How an API writes its answers, its events and its errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

from pydantic import BaseModel

from app.declaration.null_fields import (
    with_streamed_required_nulls,
    without_nulls,
    without_streamed_nulls,
)
from app.errors import ApiError


class AnswerFormat:
    """The answer format of OpenAI's chat and text completions. Other APIs override what differs.

    `error_name` and `error_schema` describe `error_body` in the OpenAPI document. Responses carry
    their request's id in `x-request-id`, and in `id_headers` too.
    """

    id_headers: tuple[str, ...] = ()
    error_name = "Error"
    error_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    }

    def body(self, answer: BaseModel) -> dict[str, Any]:
        """The JSON of a whole answer, from the object that vLLM's serving class returned."""
        return without_nulls(answer.model_dump(mode="json"))  # type: ignore[no-any-return]

    def corrected(self, stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The items of vLLM's stream, before each becomes an event."""
        return stream

    def repeats_answer(self, item: Any) -> bool:
        """Whether an item of vLLM's stream may hold as much as a whole answer."""
        return False

    def event(self, item: Any, *, null_usage: bool = False) -> str:
        """The text of an event, from an item of vLLM's stream.

        With `null_usage`, chunks without usage have `"usage": null`.
        """
        return with_streamed_required_nulls(without_streamed_nulls(item), usage=null_usage)

    def error_event(self, error: ApiError, sequence_number: int = 0) -> str:
        """An error as an event of a stream that had `sequence_number` events before."""
        return f"data: {json.dumps(error.envelope())}\n\n"

    def error_body(self, error: ApiError, request_id: str | None) -> dict[str, Any]:
        """The JSON of a response with an error."""
        return error.envelope()


OPENAI = AnswerFormat()
