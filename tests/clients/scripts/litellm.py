"""litellm: chat with a tool, a stream, and Messages as if this were Anthropic."""

import os

import litellm

base = os.environ["BASE"]
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ask = {"model": "openai/stand-in", "api_base": base + "/v1", "api_key": "none"}
message = litellm.completion(messages=messages, tools=tools, **ask).choices[0].message
[call] = message.tool_calls
messages += [
    message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
answer = litellm.completion(messages=messages, tools=tools, **ask)
assert "sunny" in answer.choices[0].message.content
pieces = litellm.completion(
    messages=[{"role": "user", "content": "Hi"}], stream=True,
    stream_options={"include_usage": True}, **ask,
)  # fmt: skip
assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
claude = litellm.completion(
    model="anthropic/stand-in", api_base=base, api_key="none", max_tokens=32,
    messages=[{"role": "user", "content": "Hi"}],
)  # fmt: skip
assert claude.choices[0].message.content
