"""Requests that nobody means well with: by mutation, by byte, and picked by hand."""
# ruff: noqa: E501 - tables are read across

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

from .gateway import MODEL

JSON = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "hi"}
# What is good about each route; a mutant is one of these with something changed.
GOOD: dict[str, list[JSON]] = {
    "/v1/chat/completions": [
        {"model": MODEL, "messages": [USER], "max_tokens": 4},
        {
            "model": MODEL, "max_tokens": 4, "tools": [TOOL], "tool_choice": "none",
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "logprobs": True, "top_logprobs": 2, "seed": 1, "temperature": 1.0, "n": 2,
        },
        {
            "model": MODEL, "max_tokens": 4, "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}},
            },
        },
    ],
    "/v1/completions": [
        {"model": MODEL, "prompt": "def f(", "max_tokens": 4},
        {
            "model": MODEL, "prompt": ["a", "b"], "max_tokens": 4, "n": 2, "logprobs": 2,
            "stop": ["\n"], "logit_bias": {"5": 1}, "echo": True, "top_p": 0.9, "min_p": 0.1,
            "speculation": {"max_k": 1}, "stream_options": {"include_usage": True},
        },
        {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "structured_outputs": {"regex": "a+"}},
        {"model": MODEL, "prompt": "a", "max_tokens": 4, "use_beam_search": True, "n": 2, "length_penalty": 2.0},
    ],
    "/v1/responses": [
        {"model": MODEL, "input": "hi", "max_output_tokens": 16},
        {"model": MODEL, "input": [USER], "max_output_tokens": 16, "instructions": "Be brief."},
    ],
    "/v1/responses/input_tokens": [
        {"model": MODEL, "input": [USER], "instructions": "Be brief.", "tools": [], "truncation": "auto"},
    ],
    "/v1/messages": [
        {"model": MODEL, "messages": [USER], "max_tokens": 4, "system": "Be brief."},
        {
            "model": MODEL, "max_tokens": 4, "stop_sequences": ["x"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        },
    ],
    "/v1/messages/count_tokens": [{"model": MODEL, "messages": [USER]}],
    "/tokenize": [{"model": MODEL, "prompt": "a"}, {"model": MODEL, "messages": [USER]}],
    "/detokenize": [{"model": MODEL, "tokens": [1, 2, 3]}],
    "/invocations": [{"prompt": "def f(", "max_tokens": 4}, {"messages": [USER], "max_tokens": 4}],
}  # fmt: skip

# Values that have broken parsers, comparisons, C extensions and each other.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 128, 129, 2**31, 2**63 - 1, -(2**63), 0.0, -0.0, 0.5, 1e308, -1e308,
    5e-324, "", " ", "a", "\x00", "\n", "\u202e", "\ud83d\ude00", "\ufeff", "﷽" * 50, "a" * 5000, "5", "nan",
    "Infinity", "<|im_start|>", "{{ 7*7 }}", "{% for x in range(9**9) %}{% endfor %}", "../../etc/passwd",
    "file:///etc/passwd", "http://169.254.169.254/", "%s%n", "'; drop table", "auto", "none", "required",
    [], [None], [[]], [[[[[]]]]], [0], [-1], [2**62], [""], ["a", 1], ["a"] * 200, [{}], {}, {"": None},
    {"a": {"b": {"c": {}}}}, {"type": "text"}, {"type": "function"}, {"type": "json_schema"},
    {"type": "json_object"}, {"$ref": "#"}, {"0": -100}, {"99999999": 1}, {"-1": 1}, {"x": "y"},
]  # fmt: skip
EXTRA = [
    "best_of", "prompt_logprobs", "guided_json", "structured_outputs", "response_format", "stop",
    "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens", "max_tokens",
    "max_completion_tokens", "n", "seed", "top_k", "top_p", "min_p", "temperature", "stream",
    "stream_options", "suffix", "echo", "tools", "tool_choice", "parallel_tool_calls", "user",
    "priority", "request_id", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "truncate_prompt_tokens", "documents", "reasoning_effort", "thinking",
    "vllm_xargs", "speculation", "prompt_embeds", "kv_transfer_params", "cache_salt", "store",
    "previous_response_id", "background", "metadata", "text", "include", "system", "logprobs",
    "repetition_penalty", "frequency_penalty", "length_penalty", "use_beam_search", "skip_special_tokens",
    "return_token_ids", "return_tokens_as_token_ids", "logprob_token_ids", "thinking_token_budget",
    "repetition_detection", "truncation_side", "media_io_kwargs", "mm_processor_kwargs", "watermarking",
]  # fmt: skip
ADDED = ["content", "role", "name", "type", "tool_calls", "tool_call_id", "image_url"]


def mutants(random: Random) -> Iterator[tuple[str, JSON]]:
    """Good bodies with one to three changes, for ever."""
    while True:
        path = random.choice(list(GOOD))
        body = deepcopy(random.choice(GOOD[path]))
        for _ in range(random.choice((1, 1, 2, 3))):
            _change(random, body)
        yield path, body


def _change(random: Random, body: JSON) -> None:
    kind, places = random.random(), list(_places(body))
    if kind < 0.5 or not places:  # a field of the API with a value of another
        body[random.choice(EXTRA)] = deepcopy(random.choice(VALUES))
        return
    container, key = random.choice(places)
    if kind < 0.8:
        container[key] = deepcopy(random.choice(VALUES))
    elif kind < 0.9:
        del container[key]
    elif isinstance(container, dict):
        container[random.choice(ADDED)] = deepcopy(random.choice(VALUES))
    else:
        container.insert(0, deepcopy(random.choice(VALUES)))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside of a body, as container and key."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
    for key, value in items:
        yield node, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def damaged(random: Random) -> Iterator[bytes]:
    """Whole HTTP requests with bytes changed, cut, doubled or dropped, for ever."""
    while True:
        path = random.choice([*GOOD, "/v1/models", "/metrics", "/v1/speculation"])
        good = random.choice(GOOD[path]) if path in GOOD else None
        data = bytearray(_raw(path, good))
        for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
            _damage(random, data)
        yield bytes(data)


def _raw(path: str, body: JSON | None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "x-request-timeout: 20",
        "x-request-id: abc",
        "Connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


def _damage(random: Random, data: bytearray) -> None:
    if len(data) < 2:
        return
    at = random.randrange(len(data))
    length = random.choice((1, 1, 2, 8, 64))
    kind = random.randrange(6)
    if kind == 0:
        data[at] ^= 1 << random.randrange(8)
    elif kind == 1:
        data[at : at + length] = random.randbytes(length)
    elif kind == 2:
        data[at:at] = random.choice(
            [b"\r\n", b"\x00", b'"', b"{", b"[" * 2000, b"\xff" * 8, b"1e9"]
        )
    elif kind == 3:
        del data[at : at + length]
    elif kind == 4:
        data[at:at] = data[at : at + length] * 3
    else:
        del data[at:]


def _schema(schema: Any) -> JSON:
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"model": MODEL, "messages": [USER], "max_tokens": 8, "response_format": named}


def _text(**fields: Any) -> JSON:
    return {"model": MODEL, "prompt": "def f(", "max_tokens": 4, **fields}


def _chat(*messages: Any, **fields: Any) -> JSON:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 4, **fields}


def _nested(depth: int, key: str = "properties") -> JSON:
    schema: JSON = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", key: {"a": schema}}
    return schema


_FAN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 6} for i in range(12)}
_IMAGE = "http://169.254.169.254/latest/meta-data"

# (path, body, headers). Each was a crash, a hang, a 500 or a leak of some server.
CORPUS: list[tuple[str, Any, dict[str, str]]] = [
    *[
        ("/v1/completions", _text(**fields), {})
        for fields in (
            {"n": 16384}, {"n": 0}, {"n": -1}, {"n": 2**40}, {"n": True}, {"n": 1.5}, {"n": "2"},
            {"best_of": 3}, {"logprobs": 10**6}, {"logprobs": -1}, {"prompt_logprobs": -1},
            {"prompt_logprobs": 10**6}, {"stop": "a" * 2**20}, {"stop": ["a"] * 10**4}, {"stop": [""]},
            {"stop": [None]}, {"max_tokens": 0}, {"max_tokens": 2**31}, {"max_tokens": -1},
            {"min_tokens": 10**9}, {"temperature": -1}, {"temperature": 1e308}, {"top_p": 0},
            {"top_p": 1.1}, {"top_k": -7}, {"top_k": 2**40}, {"min_p": 2}, {"seed": 2**70},
            {"seed": -(2**63)}, {"logit_bias": {"1e9": 1}}, {"logit_bias": {"999999": 100}},
            {"logit_bias": {str(i): 1 for i in range(5000)}}, {"logit_bias": {"5": 1e308}},
            {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": [10**9]},
            {"bad_words": [""]}, {"bad_words": ["\x00"]}, {"stop_token_ids": [-1]},
            {"stop_token_ids": [2**40]}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]},
            {"prompt": [-1]}, {"prompt": [10**9]}, {"prompt": [1.5]}, {"prompt": [[1], ["a"]]},
            {"prompt": "a" * 2**20}, {"prompt": ["a"] * 2000}, {"prompt": {"a": 1}}, {"prompt": None},
            {"prompt": "\x00"}, {"prompt": "<|endoftext|>" * 50}, {"prompt": "<image>" * 50},
            {"suffix": "x"}, {"echo": True, "max_tokens": 0, "logprobs": 3}, {"stream": "yes"},
            {"stream_options": {"include_usage": True}}, {"priority": -(10**9)}, {"user": "\n\r\x1b[31m"},
            {"request_id": "../../x"}, {"cache_salt": ""}, {"prompt_embeds": "AAAA"},
            {"kv_transfer_params": {"do_remote_prefill": True}}, {"vllm_xargs": {"aerie_max_k": "x"}},
            {"speculation": {"max_k": -1}}, {"speculation": []}, {"use_beam_search": True},
            {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"length_penalty": 1e300},
            *({"use_beam_search": True, "n": 2, "length_penalty": x} for x in (1e3, -1e3, 1e300, -1e300)),
            {"use_beam_search": True, "n": 2, "echo": True, "logprobs": 1},
            {"use_beam_search": True, "n": 2, "echo": True, "max_tokens": 0},
            {"truncate_prompt_tokens": -5}, {"truncate_prompt_tokens": 10**9},
            {"structured_outputs": {"grammar": "root ::= "}},
            {"structured_outputs": {"grammar": 'root ::= root "a" | "a"'}},
            {"structured_outputs": {"regex": "(a+)+$"}}, {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"regex": "a{1,100000}"}}, {"structured_outputs": {"choice": []}},
            {"structured_outputs": {"choice": [""]}}, {"structured_outputs": {"json": "{"}},
            {"structured_outputs": {"regex": "a", "choice": ["a"]}}, {"structured_outputs": {}},
        )
    ],
    *[
        ("/v1/chat/completions", _schema(schema), {})
        for schema in (
            {"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://169.254.169.254/"}, _nested(65),
            _nested(300), {"$defs": _FAN, "$ref": "#/$defs/d0"}, {"type": "nonsense"}, [], "x", 5, None,
            {"enum": []}, {"enum": list(range(5000))}, {"pattern": "(a+)+$", "type": "string"},
            {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 10**9},
            {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
            {"type": "integer", "minimum": 10, "maximum": 1}, {"not": {}}, {"const": "\ud83d\ude00"},
        )
    ],
    *[
        ("/v1/chat/completions", body, {})
        for body in (
            _chat(), _chat(None), _chat(5), _chat([]), _chat({}), _chat({"role": "user"}), _chat({"role": "x"}),
            _chat({"role": "user", "content": None}), _chat({"role": "user", "content": 5}),
            _chat({"role": "user", "content": []}), _chat({"role": "user", "content": [{}]}),
            _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": _IMAGE}}]}),
            _chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}),
            _chat({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
            _chat({"role": "assistant", "tool_calls": [{}]}), _chat({"role": "tool", "content": "x"}),
            _chat({"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": "{"}}]}),
            _chat(USER, messages=None), _chat(*([USER] * 5000)), _chat(USER, tools=[{"type": "function"}]),
            _chat(USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
            _chat(USER, tools=[{"type": "function", "function": {}}], tool_choice={"type": "function"}),
            _chat(USER, tools=[TOOL] * 300), _chat(USER, tools={}), _chat(USER, tool_choice="required"),
            _chat(USER, chat_template="{{ messages.__class__ }}"), _chat(USER, logprobs=True, top_logprobs=21),
            _chat(USER, top_logprobs=3), _chat(USER, chat_template_kwargs={"messages": []}),
            _chat(USER, chat_template_kwargs={"padding": "max_length", "max_length": 10**9}),
            _chat(USER, chat_template_kwargs={"tools": [TOOL] * 300}), _chat(USER, chat_template_kwargs=[]),
            _chat(USER, continue_final_message=True, add_generation_prompt=True), _chat(USER, model=""),
            _chat(USER, model="x" * 10**5), _chat(USER, model=None), _chat(USER, model=["a"]),
            _chat(USER, documents=[{}]), _chat(USER, add_special_tokens="x"), _chat(USER, echo=True),
        )
    ],
    *[
        ("/v1/responses", {"model": MODEL, "max_output_tokens": 16, **fields}, {})
        for fields in (
            {"input": []}, {"input": None}, {"input": [{}]}, {"input": [{"type": "message"}]},
            {"input": "a", "previous_response_id": "resp_x"}, {"input": "a", "background": True},
            {"input": "a", "store": True, "previous_response_id": 5}, {"input": "a", "tools": [{}]},
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            {"input": "a", "text": {"format": {"type": "json_schema"}}}, {"input": "a", "include": ["x"]},
        )
    ],
    *[
        ("/v1/messages", {"model": MODEL, "max_tokens": 4, **fields}, {})
        for fields in (
            {"messages": []}, {"messages": [{}]}, {"messages": [USER], "system": 5},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": _IMAGE}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            {"messages": [USER], "tools": [{}]}, {"messages": [USER], "max_tokens": 0},
            {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": -1}},
        )
    ],
    *[
        ("/v1/completions", _text(), headers)
        for headers in (
            {"x-request-timeout": "nan"}, {"x-request-timeout": "-1"}, {"x-request-timeout": "1e999"},
            {"x-request-timeout": "9" * 5000}, {"x-request-id": "a\tb"}, {"x-request-id": "x" * 5000},
            {"authorization": "Bearer"}, {"authorization": "Basic " + "A" * 5000}, {"x-api-key": ""},
            {"content-type": "application/json; charset=utf-16"}, {"content-encoding": "gzip"},
            {"accept": "x/" + "y" * 5000}, {"expect": "100-continue"},
            {"upgrade": "websocket", "connection": "upgrade"}, {"x-forwarded-for": "' or 1=1"},
            {"x-amzn-sagemaker-custom-attributes": "route=/v1/../metrics"},
        )
    ],
    ("/detokenize", {"model": MODEL, "tokens": [-1]}, {}),
    ("/detokenize", {"model": MODEL, "tokens": [2**40]}, {}),
    ("/detokenize", {"model": MODEL, "tokens": [1] * 10**5}, {}),
    ("/tokenize", {"model": MODEL, "prompt": "a" * 2**21}, {}),
    ("/tokenize", {"model": MODEL, "messages": [USER], "chat_template": "{{ x }}"}, {}),
    ("/v1/speculation", {"objective": "fixed", "k": 10**9}, {}),
    ("/v1//completions", _text(), {}),
    ("/v1/../v1/completions", _text(), {}),
    ("/%2e%2e/metrics", None, {}),
    ("/v1/models/" + "x" * 8000, None, {}),
    ("/v1/models/..%2f..%2fetc%2fpasswd", None, {}),
    ("/v1/models/%00", None, {}),
    ("/v1/models/%ff%fe", None, {}),
    ("/metrics?name[]=%00", None, {}),
    ("/openapi.json", None, {}),
]  # fmt: skip
