"""What holds the calls of each of vLLM's tool parsers to the tools of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm import envs
from vllm.parser import abstract_parser
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.mistral import is_mistral_tokenizer, is_mistral_tool_parser

from app.declaration.held_calls import CallGrammar
from app.validation.constraints import relax

# Their own parser (vllm/parser/cohere_command.py) makes one grammar of tools and a format, in which
# a call is a choice also where it is demanded.
_COHERE = ("cohere_command3", "cohere_command4")
_takes_as_sent = abstract_parser._xgrammar_supports


def _takes_as_enforced(constraint: StructuredOutputsParams) -> bool:
    """Whether xgrammar takes a format in the form in which it is enforced.

    vLLM asks this of a format as it was sent, beside tools. An answer to one that is not taken
    would be held to the format alone, in which no call fits.
    """
    enforced = replace(constraint)
    relax(enforced)
    return _takes_as_sent(enforced)


abstract_parser._xgrammar_supports = _takes_as_enforced


def call_grammar(name: str, tool_parser: Any, tokenizer: Any, strict_level: str) -> CallGrammar:
    """What is held of the calls that vLLM's class `tool_parser`, registered as `name`, reads, where
    the server's setting `tool_strict_level` is `strict_level`.

    A structural tag holds all of them (vllm/parser/abstract_parser.py, _apply_structural_tag). At
    the level `auto` a call that is not forced has none unless a tool is strict, and a format then
    holds the answer alone. Without a tag a call may be forced as JSON. Mistral's parser makes a
    grammar for Mistral's own tokenizers, and forces calls as JSON with others, both in chats alone
    (vllm/parser/mistral.py).
    """
    if name in _COHERE:
        return CallGrammar(name, forces=False)
    if is_mistral_tool_parser(tool_parser):
        has_grammar = is_mistral_tokenizer(tokenizer) and tokenizer.supports_grammar
        return CallGrammar(name, beside_formats=has_grammar, in_responses=False)
    has_tag = tool_parser.structural_tag_model is not None and envs.VLLM_ENFORCE_STRICT_TOOL_CALLING
    forces = has_tag or tool_parser.supports_required_and_named
    is_auto = strict_level == "auto" and tool_parser.default_tool_strict_level is None
    return CallGrammar(
        name, forces=forces, beside_formats=has_tag, formats_need_strict=has_tag and is_auto
    )
