"""The embedded target's chat format: ChatML turns, with tools and tool calls in the Hermes form.

Servers render `CHAT_TEMPLATE`; `render` writes the same format for the plain turns that training
uses (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part is string -%}
        {{- part -}}
      {%- elif part is mapping and part.get('text') is string -%}
        {{- part['text'] -}}
      {%- elif part is mapping and part.get('refusal') is string -%}
        {{- part['refusal'] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set system = namespace(text='') -%}
{%- set first_is_system = messages and messages[0]['role'] in ('system', 'developer') -%}
{%- if first_is_system -%}
  {%- set system.text = text(messages[0].get('content')) -%}
{%- endif -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if system.text -%}{{- system.text + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools>\\n\\nAnswer a call as\\n<tool_call>\\n' -}}
  {{- '{"name": <function>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif first_is_system -%}
  {{- '<|im_start|>system\\n' + system.text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if loop.first and first_is_system -%}
  {%- elif role in ('tool', 'function') -%}
    {%- set previous = messages[loop.index0 - 1]['role'] if not loop.first else '' -%}
    {%- if previous not in ('tool', 'function') -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + text(message.get('content')) + '\\n</tool_response>' -}}
    {%- set next = messages[loop.index]['role'] if not loop.last else '' -%}
    {%- if next not in ('tool', 'function') -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + ('system' if role == 'developer' else role) + '\\n' -}}
    {{- text(message.get('content')) -}}
    {%- if role == 'assistant' -%}
      {{- message.get('refusal') or '' if not message.get('content') else '' -}}
      {%- for call in message.get('tool_calls') or [] -%}
        {%- set function = call.get('function') or call -%}
        {%- set arguments = function.get('arguments') -%}
        {%- if not loop.first or message.get('content') -%}{{- '\\n' -}}{%- endif -%}
        {{- '<tool_call>\\n{"name": ' + (function.get('name') | tojson) + ', "arguments": ' -}}
        {{- (arguments or '{}') if arguments is string or not arguments else arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
      {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """Write turns of plain text in the template's format."""
    turns = "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages
    )
    return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")
