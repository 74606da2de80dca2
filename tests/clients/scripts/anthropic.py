"""anthropic: messages.stream, a tool over two turns, token counting."""

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ["BASE"], api_key="none")
model = "stand-in"
tools = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
asked = {"model": model, "max_tokens": 128, "tools": tools}
with client.messages.stream(messages=messages, **asked) as stream:
    for _ in stream:
        pass
    message = stream.get_final_message()
assert message.stop_reason == "tool_use", message
[use] = [block for block in message.content if block.type == "tool_use"]
assert use.input == {"city": "Rome"}
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
messages += [
    {"role": "assistant", "content": message.content},
    {"role": "user", "content": [result]},
]
answer = client.messages.create(messages=messages, **asked)
assert "sunny" in answer.content[0].text
counted = client.messages.count_tokens(model=model, messages=messages, tools=tools)
assert counted.input_tokens == answer.usage.input_tokens + (
    answer.usage.cache_read_input_tokens or 0
)
