"""pydantic-ai: an agent with a tool, over chat and over Responses."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE"] + "/v1", api_key="none")
cities = []


def get_weather(city: str) -> str:
    """Weather of a city."""
    cities.append(city)
    return "sunny"


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("stand-in", provider=provider), tools=[get_weather])
    cities.clear()
    result = agent.run_sync("What is the weather in Rome?")
    assert cities == ["Rome"], kind
    assert "sunny" in result.output, kind
    again = agent.run_sync("And now?", message_history=result.all_messages())
    assert again.output, kind
