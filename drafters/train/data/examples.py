"""Prompts as JSON lines: `{"messages": [...]}` or `{"prompt": "..."}`, checked line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

Malformed = Literal["fail", "skip"]  # what to do with a line that is no prompt
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt: a conversation up to the assistant's turn, or plain text."""

    messages: tuple[dict, ...] | None
    prompt: str | None
    tools: list[dict] | None = None  # passed to the chat template
    where: str = field(default="", compare=False)  # FILE:LINE, for error messages

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("an example has either messages or a prompt")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools need messages")


class MalformedLine(ValueError):
    """A line that is not a valid example; the error's text is "FILE:LINE: reason"."""

    def __init__(self, file: Path, line: int, reason: str) -> None:
        super().__init__(f"{file}:{line}: {reason}")
        self.file, self.line, self.reason = file, line, reason


def read_examples(
    files: Sequence[Path],
    *,
    malformed: Malformed = "fail",
    report: Callable[[str], None] = print,
) -> list[Example]:
    """All examples of the files, in order. Blank lines are ignored.

    A malformed line raises `MalformedLine`, or with "skip" is reported and left out. Keys other
    than `messages`, `prompt` and `tools` are ignored: data sets carry columns of their own.
    """
    examples: list[Example] = []
    skipped = 0
    for file in files:
        for number, line in _lines(file):
            try:
                examples.append(_parse(line, f"{file}:{number}"))
            except ValueError as error:
                bad = MalformedLine(file, number, str(error))
                if malformed == "fail":
                    raise bad from None
                report(str(bad))
                skipped += 1
    if skipped:
        report(f"skipped {skipped} malformed of {skipped + len(examples)} lines")
    if not examples:
        names = ", ".join(map(str, files)) or "no files"
        raise ValueError(f"not one prompt in {names}")
    return examples


def encode(
    example: Example,
    tokenizer: Any,
    *,
    max_tokens: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int] | None:
    """Token ids of the prompt; None if there are more than `max_tokens`.

    `template_kwargs` are arguments of the chat template. It writes its own special tokens, so the
    tokenizer adds none to messages. Raises ValueError if there is no template, if it refuses the
    messages, or if the prompt has no token.
    """
    if example.messages is None:
        ids = tokenizer(example.prompt)["input_ids"]
    else:
        if not tokenizer.chat_template:
            raise ValueError(_at(example, "the tokenizer has no chat template for `messages`"))
        try:
            text = tokenizer.apply_chat_template(
                _with_known_roles(example, tokenizer),
                tools=example.tools,
                add_generation_prompt=True,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template may raise anything
            raise ValueError(_at(example, f"the chat template refuses it: {error}")) from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(_at(example, "the prompt has no token"))
    return list(ids) if len(ids) <= max_tokens else None


def encode_examples(
    examples: Sequence[Example],
    tokenizer: Any,
    *,
    max_tokens: int,
    template_kwargs: Mapping[str, Any] | None = None,
    most: int | None = None,
    malformed: Malformed = "fail",
    report: Callable[[str], None] = print,
) -> tuple[list[list[int]], int]:
    """Token ids of the prompts that have at most `max_tokens`, `most` of them or all; and how many
    were longer. One that cannot be encoded raises ValueError, or with "skip" is reported and left
    out."""
    prompts: list[list[int]] = []
    too_long = 0
    for example in examples:
        if len(prompts) == most:
            break
        try:
            ids = encode(example, tokenizer, max_tokens=max_tokens, template_kwargs=template_kwargs)
        except ValueError as error:
            if malformed == "fail":
                raise
            report(str(error))
            continue
        if ids is None:
            too_long += 1
        else:
            prompts.append(ids)
    return prompts, too_long


def _with_known_roles(example: Example, tokenizer: Any) -> list[dict]:
    """The messages as a server gives them to a template that does not name developers: theirs are
    the system's, of which one at the beginning has all texts (vllm/renderers/hf.py,
    safe_apply_chat_template)."""
    messages = list(example.messages or ())
    if not any(message["role"] == "developer" for message in messages):
        return messages
    template = tokenizer.get_chat_template(tools=example.tools)
    if '"developer"' in template or "'developer'" in template:
        return messages
    texts, others = list[str](), list[dict]()
    for message in messages:
        if message["role"] not in ("developer", "system"):
            others.append(message)
        elif message["content"]:
            texts.append(message["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _at(example: Example, reason: str) -> str:
    return f"{example.where}: {reason}" if example.where else reason


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank. Only a newline ends a line, as in JSON lines."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _parse(line: bytes, where: str) -> Example:
    """The example of one line. Raises ValueError that says what is wrong with it."""
    try:
        text = line.decode().rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"a line must be an object, got {_kind(document)}")
    # A null column is an absent one: exports of tables write both.
    messages, prompt, tools = (document.get(key) for key in ("messages", "prompt", "tools"))
    if messages is None and prompt is None:
        raise ValueError("neither `messages` nor `prompt`")
    if messages is not None and prompt is not None:
        raise ValueError("both `messages` and `prompt`")
    _check_characters([messages, prompt, tools])
    if prompt is not None:
        if not isinstance(prompt, str):
            raise ValueError(f"`prompt` must be a string, got {_kind(prompt)}")
        if not prompt:
            raise ValueError("`prompt` is empty")
        if tools:
            raise ValueError("`tools` need `messages`")
        return Example(messages=None, prompt=prompt, where=where)
    return Example(messages=_messages(messages), prompt=None, tools=_tools(tools), where=where)


def _messages(value: object) -> tuple[dict, ...]:
    if not isinstance(value, list):
        raise ValueError(f"`messages` must be a list, got {_kind(value)}")
    if not value:
        raise ValueError("`messages` is empty")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(value)]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the target writes its own answer
    if not messages:
        raise ValueError("`messages` has only the assistant's")
    return tuple(messages)


def _message(value: object, name: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` must be an object, got {_kind(value)}")
    if "role" not in value:
        raise ValueError(f"`{name}` has no role")
    role = value["role"]
    if role not in ROLES:
        raise ValueError(f"`{name}.role` must be one of {', '.join(ROLES)}, got {role!r}")
    if role == "assistant":
        value = _with_reasoning(value)
        if "tool_calls" in value:
            value = _with_calls(value, name)
    content = value.get("content")
    if content is None:
        if role == "assistant" and value.get("tool_calls"):
            return {**value, "content": ""}
        raise ValueError(f"`{name}` has no content")
    if isinstance(content, str):
        return value
    if not isinstance(content, list):
        raise ValueError(f"`{name}.content` must be a string, got {_kind(content)}")
    return {**value, "content": "\n".join(_part(part, name) for part in content)}


def _with_reasoning(message: dict) -> dict:
    """An assistant's message with its reasoning under both names that templates have for it, as a
    server gives it to them (vllm/renderers/chat_utils.py, _parse_chat_message_content)."""
    names = ("reasoning", "reasoning_content")
    texts = [message[name] for name in names if message.get(name) is not None]
    others = {key: value for key, value in message.items() if key not in names}
    return others | dict.fromkeys(names, texts[0]) if texts else others


def _with_calls(message: dict, name: str) -> dict:
    """An assistant's message with its tool calls as a server gives them to the chat template: their
    arguments as objects, an empty one for what is none (vllm/renderers/chat_utils.py,
    _postprocess_messages)."""
    calls = message["tool_calls"]
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"`{name}.tool_calls` must be a list of objects")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise ValueError(f"`{name}.tool_calls[{index}]` is no call of a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            arguments = {}
        read.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": read}


def _part(value: object, name: str) -> str:
    """The text of one content part: templates of text models read strings only."""
    if not isinstance(value, dict) or value.get("type") != "text":
        raise ValueError(f"`{name}.content` has a part that is not text")
    if not isinstance(value.get("text"), str):
        raise ValueError(f"`{name}.content` has a text part without text")
    return value["text"]


def _tools(value: object) -> list[dict] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("`tools` must be a list of objects")
    return [_tool(item) for item in value]


def _tool(tool: dict) -> dict:
    """A tool as a server gives it to the chat template, which writes it as JSON: the keys that vLLM
    knows, in its order (ChatCompletionToolsParam). What no server takes stays as it is."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return tool
    described = {key: function.get(key) for key in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        described["strict"] = function["strict"]
    return {"type": "function", "function": described}


def _check_characters(value: object) -> None:
    """Raise ValueError for an unpaired surrogate: JSON can spell it, no tokenizer can read it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("text with an unpaired surrogate") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document: dict[str, object] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"duplicate key {key!r}")
        document[key] = value
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: object) -> str:
    kinds: dict[type, str] = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }
    return kinds[type(value)]
