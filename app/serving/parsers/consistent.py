"""Corrections of vLLM's parsers: a whole answer is read as its stream is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.parser.harmony import HarmonyParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

from app.serving.parsers.deltas import calls_of, joined
from app.serving.parsers.harmony import GatewayHarmonyParser
from app.serving.parsers.hermes import HermesToolParser
from app.serving.parsers.llama import LlamaToolParser
from app.serving.parsers.whole_as_stream import WholeAsStream

Parsed = tuple[str | None, str | None, list[FunctionCall] | None]

# vLLM's tool parser -> the one that replaces it.
_REPLACED: dict[type, type] = {
    Hermes2ProToolParser: HermesToolParser,
    Llama3JsonToolParser: LlamaToolParser,
}


def consistent(parser: type | None) -> Any:
    """Derive from vLLM's `parser` class (vllm/parser/abstract_parser.py) one that corrects whole
    answers with a cut tool call, and the first delta of a call."""
    if parser is None:
        return None
    if parser is HarmonyParser:
        parser = GatewayHarmonyParser
    tool_parser = getattr(parser, "tool_parser_cls", None)
    replaced = {"tool_parser_cls": _REPLACED.get(tool_parser, tool_parser)} if tool_parser else {}
    return type(parser.__name__, (_Consistent, parser), replaced)


def bounds_reasoning(engine: Any) -> bool:
    """Whether the engine can end reasoning at a number of tokens: it needs a parser that has
    strings for its beginning and end, which that of gpt-oss has not."""
    config = engine.vllm_config.reasoning_config
    return config is not None and bool(config.enabled)


class _Consistent:
    """The corrections. Mixed into a parser class, in front of it."""

    _tool_parser: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._again = lambda: type(self)(*args, **kwargs)
        self._prompt: list[int] = []
        self._calls: list[FunctionCall] = []  # of a whole answer
        self._deltas: list[DeltaMessage] = []  # of a stream, those with calls

    @property
    def _reads_alike(self) -> bool:
        """Whether the tool parser itself reads whole answers and streams alike."""
        return isinstance(self._tool_parser, WholeAsStream)

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Remember the prompt: it says whether reasoning is open when the answer begins."""
        self._prompt = list(prompt_token_ids)
        super().set_prompt_token_ids(prompt_token_ids)  # type: ignore[misc]

    def calls(self) -> list[FunctionCall]:
        """The calls that were found, with their arguments as the model wrote them."""
        return self._calls or calls_of(self._deltas)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> Parsed:
        """Reasoning, content and calls of a whole answer.

        Where vLLM finds no call, or rewrites its arguments, the answer is read as a stream of one
        delta, which shows a call that the token limit cut.
        """
        parsed = self._parsed(model_output, request, enable_auto_tools, model_output_token_ids)
        self._calls = parsed[2] or []
        return parsed

    def _parsed(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool,
        model_output_token_ids: Sequence[int],
    ) -> Parsed:
        tool_parser = self._tool_parser
        as_json = (
            tool_parser is not None
            and tool_parser.supports_required_and_named
            and request.tool_choice not in (None, "auto", "none")
        )
        if self._reads_alike and request.tool_choice != "none" and not as_json:
            reasoning, content = self.extract_reasoning(model_output, request)  # type: ignore[attr-defined]
            found = tool_parser.extract_tool_calls(content or "", request)
            return reasoning, found.content, [call.function for call in found.tool_calls]
        parsed: Parsed = super().parse(  # type: ignore[misc]
            model_output,
            request,
            enable_auto_tools=enable_auto_tools,
            model_output_token_ids=model_output_token_ids,
        )
        if tool_parser is None or not request.tools or request.tool_choice == "none":
            return parsed
        if parsed[2] and not as_json:
            return parsed
        delta = self._again().parse_delta(
            model_output, list(model_output_token_ids), request, self._prompt, finished=True
        )
        if delta is None or not delta.tool_calls:
            return parsed
        return parsed[0], delta.content or None, calls_of([delta])

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The next delta of a stream, with one entry for each call. The first one of a call always
        has arguments, empty if need be, as clients that concatenate them expect. There is none with
        `tool_choice` "none"."""
        delta: DeltaMessage | None = super().parse_delta(  # type: ignore[misc]
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        held = (
            self._tool_parser.held_back_content(request) if finished and self._reads_alike else ""
        )
        if held:
            delta = delta or DeltaMessage()
            delta.content = (delta.content or "") + held
        if delta is None or not delta.tool_calls:
            return delta
        if request.tool_choice == "none":  # HarmonyParser finds them all the same
            rest = delta.model_dump(exclude_unset=True, exclude={"tool_calls"})
            return DeltaMessage(**rest) if rest else None
        delta.tool_calls = joined(delta.tool_calls)
        self._deltas.append(delta)
        for call in delta.tool_calls:
            if call.function is not None and call.function.name and call.function.arguments is None:
                call.function.arguments = ""
        return delta
