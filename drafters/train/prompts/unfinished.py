"""Cut code to complete behind a function's signature or docstring, as users send it.

A target that continues a function's head writes the whole function. In served requests, as in
HumanEval, the function has no body yet; a head should be trained on both.
"""

from __future__ import annotations

import io
import re
import tokenize
import zlib
from collections.abc import Iterator

_FENCE = "```"
_DEF = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]", re.MULTILINE)
_BLANK = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT)


def unfinished_for_half(turn: str) -> str:
    """The turn without its first function's body for half of all texts, else unchanged.

    A checksum of the text decides, so that the same text is always treated alike.
    """
    chosen = zlib.crc32(turn.encode(errors="replace")) % 2 == 0
    return (unfinished(turn) if chosen else None) or turn


def unfinished(turn: str) -> str | None:
    """The turn up to the docstring of its first function, or to its signature if it has none.

    A fence that is open there is closed. None if there is no function, or if its head does not end
    or has the body in the same line.
    """
    start = _DEF.search(turn)
    if start is None:
        return None
    code = turn[start.start() :]
    try:
        end = _head_end(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError, ValueError, StopIteration):
        return None  # the text ends within the head, or is no Python there
    if end is None:
        return None
    row, column = end
    lines = code.split("\n")[:row]
    lines[-1] = lines[-1][:column]
    head = turn[: start.start()] + "\n".join(lines)
    return f"{head}\n{_FENCE}" if head.count(_FENCE) % 2 else head


def _head_end(tokens: Iterator[tokenize.TokenInfo]) -> tuple[int, int] | None:
    """(row from 1, column) behind a function's docstring or signature."""
    depth = 0
    while (token := next(tokens)).string != ":" or depth:
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        if token.type in (tokenize.NEWLINE, tokenize.ERRORTOKEN):
            return None
    end = token.end
    token = next(tokens)
    if token.type == tokenize.COMMENT:
        end, token = token.end, next(tokens)
    if token.type != tokenize.NEWLINE:
        return None
    while (token := next(tokens)).type in _BLANK:
        pass
    if token.type == tokenize.STRING and next(tokens).type == tokenize.NEWLINE:
        return token.end
    # For invalid text Python 3.11 gives an error token, where later versions raise.
    return None if token.type == tokenize.ERRORTOKEN else end
