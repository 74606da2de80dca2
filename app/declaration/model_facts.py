"""What the checks of a request body know about the served model and the gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass

from app.declaration.held_calls import CallGrammar
from app.settings import LimitSettings
from app.validation.tools import Unknown


@dataclass(frozen=True)
class ModelFacts:
    """The facts about one served model."""

    vocabulary: int  # token ids
    context: int  # tokens
    text_only: bool
    reads_calls: bool  # whether the model's tool calls are read
    bounds_reasoning: bool  # whether reasoning can be ended at a number of tokens
    limits: LimitSettings
    call_grammar: CallGrammar  # what is held of the model's tool calls
    unknown_tools: Unknown = "refuse"
    reports_token_origins: bool = True  # whether it is known which tokens were drafted
    any_arguments: bool = False  # whether the prompt takes calls whose arguments are no object
