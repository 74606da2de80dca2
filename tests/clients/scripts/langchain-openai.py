"""langchain-openai: a bound tool over two turns, a stream, structured output."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


class User(BaseModel):
    """A user."""

    name: str
    age: int


llm = ChatOpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none", model="stand-in")
bound = llm.bind_tools([get_weather])
history = [HumanMessage("What is the weather in Rome?")]
message = bound.invoke(history)
[call] = message.tool_calls
history += [message, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
assert "sunny" in bound.invoke(history).content
assert "".join(piece.content for piece in llm.stream("Hi")) == llm.invoke("Hi").content
assert llm.with_structured_output(User).invoke("Who?") == User(name="Ada", age=36)
responses = ChatOpenAI(
    base_url=os.environ["BASE"] + "/v1", api_key="none", model="stand-in", use_responses_api=True
)
assert responses.invoke("Hi").text
