"""instructor: a model class filled in through tools and through a JSON schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    user = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="stand-in",
        response_model=User,
        messages=[{"role": "user", "content": "Who?"}],
    )
    assert (user.name, user.age) == ("Ada", 36), (mode, user)
