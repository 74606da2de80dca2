"""The published sets that are installed, as conversations up to the assistant's turn."""

from __future__ import annotations

from bench.workloads.prompt import Prompt
from drafters.train.data.held_out_chat import conversations
from drafters.train.data.humaneval import chat_prompt, problems


def humaneval() -> list[Prompt]:
    """HumanEval's 164 problems, with the user's turn of `aerie evaluate --workload humaneval`."""
    return [Prompt(messages=({"role": "user", "content": chat_prompt(p)},)) for p in problems()]


def held_out_chat() -> list[Prompt]:
    """The default model's held-out conversations."""
    return [Prompt(messages=example.messages or ()) for example in conversations()]
