"""openai-python: chat, completions and Responses, streamed and with a tool over two turns."""

import json
import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none")
[model] = [card.id for card in client.models.list()]
question = [{"role": "user", "content": "What is the weather in Rome?"}]
parameters = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
tools = [
    {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
]

with client.chat.completions.stream(model=model, messages=question, tools=tools) as stream:
    for _ in stream:
        pass
    message = stream.get_final_completion().choices[0].message
[call] = message.tool_calls
assert json.loads(call.function.arguments) == {"city": "Rome"}, call
history = [
    *question,
    message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
answer = client.chat.completions.create(model=model, messages=history, tools=tools)
assert "sunny" in answer.choices[0].message.content


class User(BaseModel):
    name: str
    age: int


parsed = client.chat.completions.parse(model=model, messages=question, response_format=User)
assert parsed.choices[0].message.parsed == User(name="Ada", age=36)
text = client.completions.create(model=model, prompt="Hi", max_tokens=4)
assert text.choices[0].finish_reason == "length"

flat = [{"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}]
first = client.responses.create(model=model, input=question, tools=flat)
[call] = [item for item in first.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
second = client.responses.create(
    model=model, input=[result], tools=flat, previous_response_id=first.id
)
assert "sunny" in second.output_text
counted = client.responses.input_tokens.count(model=model, input=question, tools=flat)
assert counted.input_tokens == first.usage.input_tokens
with client.responses.stream(model=model, input="Hi") as stream:
    for _ in stream:
        pass
    assert stream.get_final_response().output_text
