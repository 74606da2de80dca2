"""llama-index: chat, a stream and a tool through OpenAILike."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


llm = OpenAILike(
    model="stand-in", api_base=os.environ["BASE"] + "/v1", api_key="none",
    is_chat_model=True, is_function_calling_model=True, context_window=2048,
)  # fmt: skip
hello = [ChatMessage(role="user", content="Hi")]
assert llm.chat(hello).message.content
assert "".join(piece.delta or "" for piece in llm.stream_chat(hello))
tool = FunctionTool.from_defaults(get_weather)
response = llm.chat_with_tools([tool], user_msg="What is the weather in Rome?")
[call] = llm.get_tool_calls_from_response(response)
assert call.tool_kwargs == {"city": "Rome"}
assert llm.complete("Hi").text
