"""The gateway's log: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from drafters.log_records import escape, escape_log_records

Format = Literal["text", "json"]
_FIELDS = "fields"


def with_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The `extra` of a logging call whose line shall have these fields."""
    return {_FIELDS: fields}


class TextFormatter(logging.Formatter):
    """Time, level, message, then the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message and its fields, in one line."""
        fields = getattr(record, _FIELDS, {})
        pairs = (escape(f"{name}={value}") for name, value in fields.items())
        return " ".join([super().formatMessage(record), *pairs])


class JsonFormatter(logging.Formatter):
    """One JSON object a line; line breaks of a message or a stack are inside its strings."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(level: str, form: Format, stream: TextIO | None = None) -> None:
    """Write this process's log records of at least `level` to `stream` (default: standard error).

    Other handlers, vLLM's among them, are escaped as well (drafters/log_records.py).
    """
    escape_log_records()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
