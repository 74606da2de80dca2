"""What holds the calls of each of vLLM's tool parsers to the tools of a request."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.utils.mistral import is_mistral_tokenizer, is_mistral_tool_parser

from app.declaration.held_calls import CallGrammar

# Their own parser (vllm/parser/cohere_command.py) makes one grammar of tools and a format, in which
# a call is a choice also where it is demanded.
_COHERE = ("cohere_command3", "cohere_command4")


def call_grammar(name: str, tool_parser: Any, tokenizer: Any) -> CallGrammar:
    """What is held of the calls that vLLM's class `tool_parser`, registered as `name`, reads.

    A structural tag holds all of them (vllm/parser/abstract_parser.py, _apply_structural_tag).
    Without one a call may be forced as JSON. Mistral's parser makes a grammar for Mistral's own
    tokenizers, and forces calls as JSON with others, both in chats alone (vllm/parser/mistral.py).
    """
    if name in _COHERE:
        return CallGrammar(name, forces=False)
    if is_mistral_tool_parser(tool_parser):
        has_grammar = is_mistral_tokenizer(tokenizer) and tokenizer.supports_grammar
        return CallGrammar(name, beside_formats=has_grammar, in_responses=False)
    has_tag = tool_parser.structural_tag_model is not None and envs.VLLM_ENFORCE_STRICT_TOOL_CALLING
    forces = has_tag or tool_parser.supports_required_and_named
    return CallGrammar(name, forces=forces, beside_formats=has_tag)
