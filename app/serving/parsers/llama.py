"""Parser of tool calls that are bare JSON objects (Llama 3 and 4), the same for streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regex
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
from vllm.tool_parsers.structural_tag_registry import resolve_tool_strictness
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import get_function_tools

from app.serving.parsers.whole_as_stream import WholeAsStream, forces_call

_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
# What decides where arguments end; a lone backslash is one whose next character has not come.
_MARKS = regex.compile(r'\\.?|["{}\[\]]', regex.DOTALL)


class LlamaToolParser(WholeAsStream, Llama3JsonToolParser):
    """vLLM's parser of Llama's calls (vllm/tool_parsers/llama_tool_parser.py), for streams and
    whole answers alike.

    A call begins with `{"name": "NAME", "parameters": {`, anywhere in the text, where NAME is one
    of the request's tools or `<|python_tag|>` stands in front of it. Everything else before the
    first call is content. vLLM's stream takes an answer for a call if it begins with `{`, and for
    text if it does not.

    Unless the request asks for it, no grammar holds the calls that a model may make: it would begin
    at `{"name": `, and turn any other JSON that begins so into a call.
    """

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        names = [getattr(tool, "function", tool).name for tool in get_function_tools(tools or ())]
        self._call_start = _call_start(names)
        self._text = ""
        self._sent = 0  # end of the content that was sent
        self._decided = 0  # end of the text of which it is known what it is
        self._calls = 0
        # Within the arguments of a call:
        self._depth = 0  # brackets that are open; 0 outside of arguments
        self._in_string = False
        self._escaped = False  # the last character was a backslash

    def get_structural_tag(
        self, request: Any, *, strict_level: ToolStrictLevel = ToolStrictLevel.AUTO, **kwargs: Any
    ) -> Any:
        """The grammar of an answer's calls. Where the model may also answer without one, there is
        none unless a tool is `strict` itself."""
        tools = get_function_tools(request.tools)
        if resolve_tool_strictness(tools, request.tool_choice, ToolStrictLevel.AUTO) is None:
            return None
        return super().get_structural_tag(request, strict_level=strict_level, **kwargs)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The delta of what `current_text` holds and has not been sent."""
        self._text = current_text
        content, calls = "", []
        if self._depth:
            arguments = DeltaFunctionCall(arguments=self._read_arguments())
            calls = [DeltaToolCall(index=self._calls - 1, function=arguments)]
        while not self._depth:
            match = self._call_start.search(current_text, self._decided, partial=True)
            self._decided = match.start() if match else len(current_text)
            if not self._calls:
                content += self._unsent_content()
            if match is None or match.partial:
                break
            self._decided = match.end()
            self._depth = 1
            function = DeltaFunctionCall(
                name=match["tagged"] or match["name"], arguments="{" + self._read_arguments()
            )
            calls.append(
                DeltaToolCall(
                    index=self._calls, id=make_tool_call_id(), type="function", function=function
                )
            )
            self._calls += 1
        found: dict[str, Any] = {"content": content} if content else {}
        if calls := [call for call in calls if call.id or call.function.arguments]:
            found["tool_calls"] = calls
        return DeltaMessage(**found) if found else None

    def held_back_content(self, request: Any) -> str:
        """Content that was held back, once the answer has ended: the start of what might have
        become a call, and white space that nothing came behind."""
        if self._calls or forces_call(request):
            return ""
        held, self._sent = self._text[self._sent :], len(self._text)
        return held

    def _unsent_content(self) -> str:
        """Content in front of the first call, unless it is white space alone."""
        unsent = self._text[self._sent : self._decided]
        if not self._sent and not unsent.strip():
            return ""
        self._sent = self._decided
        return unsent

    def _read_arguments(self) -> str:
        """The next arguments, as the model spells them, up to the bracket that closes them."""
        start = position = self._decided
        self._decided = len(self._text)
        if self._escaped and position < len(self._text):
            position, self._escaped = position + 1, False
        for match in _MARKS.finditer(self._text, position):
            mark = match.group()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = True
            elif not self._in_string and len(mark) == 1:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    self._decided = match.end()
                    break
        return self._text[start : self._decided]


def _call_start(names: Sequence[str]) -> Any:
    """A pattern of the text up to the first brace of a call's arguments."""

    def head(name: str) -> str:
        members = rf'{_TYPE}"name"\s*:\s*"{name}"\s*,\s*{_TYPE}"(?:parameters|arguments)"'
        return rf"\{{\s*{members}\s*:\s*\{{"

    starts = [r"<\|python_tag\|>\s*" + head(r'(?P<tagged>[^"\\]+)')]
    if names:
        starts.append(head(f"(?P<name>{'|'.join(map(regex.escape, names))})"))
    return regex.compile("|".join(starts))
