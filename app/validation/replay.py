"""Earlier turns as clients send them back, in the form that vLLM's conversion keeps whole.

vLLM reads one part of a message where there may be several, skips refusals, and drops arguments
that are no JSON object. Each function here rewrites the items of one API so that nothing is lost,
and refuses with a 400 what cannot be shown to the model. They run after the checks of shape
(app/validation/message_checks.py, app/validation/size_limits.py). No vllm import.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from app.errors import ApiError
from app.json_structure import Bounds, exceeded
from app.validation.field_checks import invalid

Item = dict[str, Any]

# Text parts of an output message, and what chat clients send in their place -> the text's field.
_OUTPUT_TEXTS = {
    "output_text": "text",
    "refusal": "refusal",
    "text": "text",
    "input_text": "text",
}
_INPUT_TEXTS = dict.fromkeys(("input_text", "text", "output_text"), "text")
_INPUT_MEDIA = ("input_image", "input_file", "input_audio")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)
# Key of the object that stands for arguments which are no JSON object.
RAW_ARGUMENTS = "raw_arguments"
# Arguments that nest deeper do not fit into a body, which may have 128 levels, nor into an answer,
# of which pydantic writes 255.
_ARGUMENTS = Bounds(values=sys.maxsize, containers=sys.maxsize, depth=100)


def object_arguments(arguments: str) -> str:
    """Arguments of a call as JSON text of an object, as chat templates need them.

    A model can write anything, and the token limit can cut it: text that is no object becomes
    the one value of an object, so that the model still sees what it wrote. So does an object that
    cannot be written as UTF-8 or nests too deeply.
    """
    if not arguments.strip():
        return "{}"
    if _is_usable_object(arguments):
        return arguments
    return json.dumps({RAW_ARGUMENTS: arguments}, ensure_ascii=False)


def _is_usable_object(text: str) -> bool:
    try:
        if exceeded(text.encode(), _ARGUMENTS) is not None:
            return False
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # escapes that may be half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def chat_messages(messages: Sequence[Item], *, any_arguments: bool = False) -> list[Item]:
    """Rewrite messages of chat completions: refusals, legacy function calls and their results,
    `reasoning_content`, and arguments that are no object.

    `any_arguments` leaves arguments as they are, for models whose prompt takes any text.
    """
    rewritten = []
    calls = 0  # legacy calls have no ids: their results follow them
    for index, message in enumerate(messages):
        message = dict(message)
        if message.get("role") == "assistant":
            if message.get("function_call") is not None:
                calls += 1
                _modernise(message, f"messages[{index}]", calls)
            message.pop("function_call", None)
            _refusals_as_text(message)
            if "reasoning" not in message and message.get("reasoning_content") is not None:
                message["reasoning"] = message.pop("reasoning_content")
            if not any_arguments:
                message |= _with_object_arguments(message)
        elif message.get("role") == "function":
            message |= {"role": "tool", "tool_call_id": f"call_{calls}"}
        rewritten.append(message)
    return rewritten


def _modernise(message: Item, where: str, number: int) -> None:
    """Turn the deprecated `function_call` of an assistant's message into `tool_calls`."""
    call = message["function_call"]
    if message.get("tool_calls"):
        raise invalid(
            f"{where}.function_call",
            f"'{where}' takes either 'function_call' or 'tool_calls', not both.",
        )
    for name in ("name", "arguments"):
        if not isinstance(call, dict) or not isinstance(call.get(name), str):
            raise invalid(
                f"{where}.function_call.{name}",
                f"'{where}.function_call.{name}' must be a string.",
            )
    message["tool_calls"] = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
    ]


def _refusals_as_text(message: Item) -> None:
    """Make a refusal the last part of the content, and parts of refusals parts of text, which all
    prompt formats read."""
    content = message.get("content")
    if isinstance(content, list):
        content = message["content"] = [_refusal_as_text(part) for part in content]
    refusal = message.pop("refusal", None)
    if not isinstance(refusal, str) or not refusal:
        return
    if isinstance(content, list):
        message["content"] = [*content, {"type": "text", "text": refusal}]
    else:
        message["content"] = f"{content}\n{refusal}" if content else refusal


def _refusal_as_text(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "refusal":
        return part
    refusal = part.get("refusal")
    return {"type": "text", "text": refusal} if isinstance(refusal, str) else part


def _with_object_arguments(message: Item) -> Item:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {}
    return {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": object_arguments(arguments)}}


def response_items(items: Iterable[Item], *, any_arguments: bool = False) -> list[Item]:
    """Rewrite input items of Responses: at most one part of text where vLLM reads one.

    Assistant messages are recognised without `type` and keep all of their parts; reasoning
    keeps all of its texts; results of calls may be lists of text. `any_arguments` as in
    `chat_messages`.
    """
    rewritten = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference":
            raise invalid(
                f"{where}.id", f"'{where}' refers to an item that is not kept here; send it whole."
            )
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise _unknown_type(where, _ITEMS)
        if kind == "message":
            item = _message(item, where)
        elif kind == "reasoning":
            item = _reasoning(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            item = {**item, "output": _result(item.get("output"), f"{where}.output")}
        elif kind == "function_call" and not any_arguments:
            arguments = item.get("arguments")
            if isinstance(arguments, str):
                item = {**item, "arguments": object_arguments(arguments)}
        rewritten.append(item)
    return [item for item in rewritten if item["type"] != "reasoning" or item["content"]]


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(
            f"{where}.role", f"Invalid value for '{where}.role': supported are {', '.join(_ROLES)}."
        )
    if role != "assistant":  # without a status, by which vLLM would continue the user's text
        found = {**item, "type": "message"}
        found.pop("status", None)
        return found
    text = _joined(item.get("content"), f"{where}.content", _OUTPUT_TEXTS)
    # The form with a status, among those that vLLM takes: by the status it continues an
    # unfinished message at the end of the input.
    return {
        "type": "message",
        "role": "assistant",
        "id": item.get("id") or f"msg_{where}",
        "status": item.get("status") or "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _joined(content: Any, where: str, fields: dict[str, str], between: str = "") -> str:
    """The text of a string or of a list of text parts.

    `fields` maps each type that a part may have to the field that holds its text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"'{where}' must be a string or a list of content parts.")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in fields:
            raise _unknown_type(place, fields)
        text = part.get(fields[kind])
        if not isinstance(text, str):
            raise invalid(f"{place}.{fields[kind]}", f"'{place}.{fields[kind]}' must be a string.")
        texts.append(text)
    return between.join(texts)


def _unknown_type(place: str, known: Iterable[str]) -> ApiError:
    return invalid(
        f"{place}.type", f"Invalid value for '{place}.type': supported are {', '.join(known)}."
    )


def _reasoning(item: Item, where: str) -> Item:
    """The item with all of its text in one part, if there is any."""
    if item.get("encrypted_content") is not None:
        raise invalid(
            f"{where}.encrypted_content",
            f"'{where}.encrypted_content' cannot be read by this server.",
        )
    texts = []
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field)
        if parts:
            texts.append(_joined(parts, f"{where}.{field}", {kind: "text", "text": "text"}))
    content = [{"type": "reasoning_text", "text": text} for text in texts if text]
    return {**item, "summary": [], "content": content[:1]}  # a summary repeats the content


def _result(output: Any, where: str) -> Any:
    """A tool's output as one text, or as it is where parts of it are media."""
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise invalid(where, f"'{where}' must be a string or a list of content parts.")
    if any(isinstance(part, dict) and part.get("type") in _INPUT_MEDIA for part in output):
        return output
    return _joined(output, where, _INPUT_TEXTS, "\n")


def anthropic_messages(messages: Sequence[Any]) -> list[Any]:
    """Rewrite messages of Anthropic's API: results of tools with other blocks than text, errors
    that tools reported, search results, and documents of text. Raises ApiError for what vLLM would
    drop."""
    return [
        {
            **message,
            "content": _blocks(_usable_inputs(message["content"]), f"messages[{index}].content"),
        }
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _usable_inputs(blocks: list[Any]) -> list[Any]:
    """The blocks; a call's `input` that cannot be written as UTF-8 is shown as its text."""
    usable = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_use":
            text = json.dumps(block.get("input"))
            if "\\ud" in text:
                block = {**block, "input": json.loads(object_arguments(text))}
        usable.append(block)
    return usable


def _blocks(blocks: list[Any], where: str) -> list[Any]:
    rewritten = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            block = {**block, "content": _tool_result(block, f"{place}.content")}
        elif kind == "search_result":
            block = {"type": "text", "text": _search_result(block, place)}
        elif kind == "document":
            block = {"type": "text", "text": _document(block, place)}
        elif kind == "redacted_thinking":
            raise invalid(
                f"{place}.type",
                f"'{place}' holds redacted thinking, which this server cannot read.",
            )
        elif kind == "tool_reference":
            raise invalid(
                f"{place}.type", f"'{place}' is allowed in the content of a tool_result only."
            )
        rewritten.append(block)
    return rewritten


def _tool_result(block: Item, where: str) -> Any:
    content = block.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str | list):
        raise invalid(where, f"'{where}' must be a string or a list of content blocks.")
    if isinstance(content, list):
        content = [_result_block(item, f"{where}[{i}]") for i, item in enumerate(content)]
    if block.get("is_error") is not True:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]


def _result_block(block: Any, place: str) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise invalid(f"{place}.text", f"'{place}.text' must be a string.")
        return block
    if kind == "search_result":
        return {"type": "text", "text": _search_result(block, place)}
    if kind == "document":
        return {"type": "text", "text": _document(block, place)}
    if kind in ("image", "tool_reference"):
        return block
    raise _unknown_type(place, ("text", "image", "search_result", "document", "tool_reference"))


def _search_result(block: Item, place: str) -> str:
    """Title, source and texts of a search result, one a line."""
    heads = []
    for field in ("title", "source"):
        value = block.get(field)
        if not isinstance(value, str):
            raise invalid(f"{place}.{field}", f"'{place}.{field}' must be a string.")
        heads.append(value)
    text = _joined(block.get("content"), f"{place}.content", {"text": "text"}, "\n")
    return "\n".join([*heads, text])


def _document(block: Item, place: str) -> str:
    """Title, context and text of a document, one a line."""
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    heads = [
        (field, block[field]) for field in ("title", "context") if block.get(field) is not None
    ]
    text: Any
    if source.get("type") == "content":
        text = _joined(source.get("content"), f"{place}.source.content", {"text": "text"}, "\n")
    elif source.get("type") == "text":
        text = source.get("data")
    else:
        raise _unknown_type(f"{place}.source", ("text", "content"))
    texts = [*heads, ("source.data", text)]
    for field, value in texts:
        if not isinstance(value, str):
            raise invalid(f"{place}.{field}", f"'{place}.{field}' must be a string.")
    return "\n".join(value for _, value in texts)
