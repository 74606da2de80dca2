"""Code to complete as it is asked for: a function that ends behind its docstring or its signature.

A target that continues a function's head writes the whole function. What is served, as in
HumanEval, has no body yet, and a head should see both.
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
    """The turn without its first function's body, for half of all texts, else the turn itself.

    A checksum of the text decides, so the same text is always treated the same.
    """
    chosen = zlib.crc32(turn.encode(errors="replace")) % 2 == 0
    return (unfinished(turn) if chosen else None) or turn


def unfinished(turn: str) -> str | None:
    """The turn up to the docstring of its first function, or its signature where it has none.

    A fence that is open there is closed. None if there is no function, or only a head that does
    not end or has its body in the same line.
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
    # Python 3.11 has a token for what is none, where later ones raise.
    return None if token.type == tokenize.ERRORTOKEN else end
