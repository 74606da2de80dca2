"""The declaration of an API endpoint: everything in which endpoints differ.

Routes exist before vllm is imported, so a declaration does not import it: what needs vllm is in
functions, which are called once for each engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from app.declaration.answers import OPENAI, AnswerFormat
from app.declaration.model_facts import ModelFacts
from app.validation.fields import Rule
from app.validation.tools import ToolRules

Payload = dict[str, Any]
Check = Callable[[Payload, ModelFacts], None]


@dataclass(frozen=True)
class ServingParts:
    """Arguments for the constructors of vLLM's serving classes, one set for each engine."""

    engine: Any  # vllm.engine.protocol.EngineClient
    models: Any  # vllm.entrypoints.openai.models.serving.OpenAIServingModels
    renderer: Any  # vllm.renderers.online_renderer.OnlineRenderer
    rendering: Mapping[str, Any]  # keyword arguments: the chat template
    parsing: Mapping[str, Any]  # keyword arguments: parsers of tool calls and reasoning

    @property
    def generating(self) -> dict[str, Any]:
        """Keyword arguments of every serving class that generates chats or texts."""
        return {
            "online_renderer": self.renderer,
            "request_logger": None,
            # Report the tokens that were in the prefix cache, as Responses does by default.
            "enable_prompt_tokens_details": True,
        }

    def chat(self, kind: Callable[..., Any]) -> Any:
        """An object of `kind`: vLLM's serving class of chats, or one that is derived from it."""
        parsing = {**self.rendering, **self.parsing}
        return kind(self.engine, self.models, "assistant", **self.generating, **parsing)


def _nothing(payload: Payload, facts: ModelFacts) -> None:
    """The check of an endpoint that has none of its own."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One path that takes a JSON body and answers with the model or its tokenizer.

    What happens to a request, in this order: null fields are dropped; `check` looks at the shape of
    the body; `tools`, `fields` and the limits of all endpoints are applied; `rewrite` brings the
    body into the form that vLLM takes; the request model validates it; `call` answers it; `answers`
    writes the answer.
    """

    name: str
    path: str
    prompt: str  # the field that holds the prompt, named by errors about prompts that are too long
    # Request models, one for each shape that a body may have, and the index of a body's shape.
    models: Callable[[], tuple[type[BaseModel], ...]]
    shape: Callable[[Payload], int] = lambda payload: 0
    # Makes vLLM's serving class; endpoints that name the same function share what it makes.
    serving: Callable[[ServingParts], Any]
    # Picks what answers a request of the model from what `serving` has made.
    call: Callable[[Any], Callable[[Any], Awaitable[Any]]]

    items: str = ""  # the field of messages or items, in which there may be media
    fields: Mapping[str, Rule]  # rules for fields that the request model does not settle
    unused: frozenset[str] = frozenset()  # fields that are checked, and do not change the answer
    ignored_members: frozenset[str] = frozenset()  # fields of inner objects that have no effect
    # Names of fields in vLLM's errors -> what this API calls them, where it has another name.
    names_in_errors: Mapping[str, str] = field(default_factory=dict)
    tools: ToolRules | None = None  # None: the API has no tools
    check: Check = _nothing
    rewrite: Check = _nothing

    generates: bool = False  # False: it uses the tokenizer alone, and is charged for its tokens
    # Fields that name a limit of the output; the first that is given counts. The last is vLLM's.
    output_limit: tuple[str, ...] = ()
    # Fields that ask for several sequences: `n`, and `prompt` where it may be a list of prompts.
    sequence_fields: tuple[str, ...] = ()
    scores_prompts: bool = False  # whether a prompt may be echoed with no output after it
    echoes_tools: bool = False  # whether an answer holds the request's tools again
    reports_token_origins: bool = False  # whether answers can say where each token comes from
    keeps_responses: bool = False  # whether answers are kept, for requests that continue them
    continues_responses: bool = False  # whether a request may name answers that are kept

    answers: AnswerFormat = OPENAI
    invocation_field: str | None = None  # selects this endpoint in a body of POST /invocations
    trace_operation: str | None = None  # its name in OpenTelemetry's GenAI conventions


def answers_for(path: str, endpoints: Iterable[Endpoint]) -> AnswerFormat:
    """The answer format of a path: of the endpoint whose path it begins with, or else OpenAI's."""
    found = (endpoint.answers for endpoint in endpoints if path.startswith(endpoint.path))
    return next(found, OPENAI)
