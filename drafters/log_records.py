"""Log records that cannot forge lines: text of a client stays inside the line that quotes it.

vLLM quotes requests in its warnings, and replaces its handlers and formatters whenever it
configures logging. So text is escaped where a record is made, which serves every logger, handler
and formatter of the process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

# Control characters of ASCII and Latin-1 but the tab, Unicode's line breaks, and its controls of
# the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Begins each line of a stack trace: its last lines are the text of an exception.
MARGIN = "  | "
_FORMATTER = logging.Formatter()


def escape(text: str) -> str:
    """Replace control characters by Python's escapes: a line break becomes `\\n`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class SafeRecordFactory:
    """A logging record factory that escapes the records of another one.

    A message becomes one line. A stack trace keeps its lines, and each begins with `MARGIN`, so
    that none can be taken for a line of the log.
    """

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Make a log record whose text cannot begin a new line."""
        record: logging.LogRecord = self._factory(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:  # arguments that do not fit: the handler reports them, in quotes
            return record
        if (escaped := escape(message)) != message:
            record.msg, record.args = escaped, None
        if record.exc_info and not record.exc_text:
            trace = _FORMATTER.formatException(record.exc_info)
            record.exc_text = "\n".join(MARGIN + escape(line) for line in trace.split("\n"))
        return record


def escape_log_records() -> None:
    """Escape every record that this process logs from now on. Safe to call more than once."""
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, SafeRecordFactory):
        logging.setLogRecordFactory(SafeRecordFactory(factory))
