"""OpenAI Agents SDK: two turns with a tool over Responses, whole and streamed."""

import asyncio
import os

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none"))


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sunny"


async def main() -> None:
    agent = Agent(name="weather", model="stand-in", tools=[get_weather])
    result = await Runner.run(agent, "What is the weather in Rome?")
    assert "sunny" in result.final_output
    further = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
    assert (await Runner.run(agent, further)).final_output
    streamed = Runner.run_streamed(agent, "What is the weather in Rome?")
    async for _ in streamed.stream_events():
        pass
    assert "sunny" in streamed.final_output


asyncio.run(main())
