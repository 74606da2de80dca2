"""Settings of the target model."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator

from app.settings.section import Section


class ModelSettings(Section):
    """The target model, its chat template and its parsers."""

    model: str = Field("", min_length=1, description="Target model: a folder or a hub id.")
    served_model_name: tuple[str, ...] = Field(
        (),
        description="Model id in the API, or several, as a JSON array in the environment; answers "
        "and metrics have the first. The last part of `model` when empty.",
    )
    revision: str | None = Field(None, description="Hub revision of the target.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Data type of weights and activations."
    )
    quantization: str | None = Field(None, description="vLLM quantisation method.")
    trust_remote_code: bool = Field(False, description="Run Python code found in the model folder.")
    chat_template: str | None = Field(
        None, description="Chat template file that replaces the model's own."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="What a chat template gets as a message's content: text, or OpenAI's list of "
        "parts; `auto` reads it from the template.",
    )
    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the chat template where a request gives none, as a JSON object: "
        '`{"enable_thinking": false}`.',
    )
    tool_call_parser: str | None = Field(
        None,
        description="vLLM tool parser; without one, tools that the model may call are refused. "
        "gpt-oss has `openai` by default.",
    )
    unknown_tools: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What to do with a request's tools that only an API's provider can run, such "
        "as `web_search`: refuse the request with a 400 that names the tool, or ignore the tool.",
    )
    tool_strict_level: Literal["auto", "function", "parameter"] = Field(
        "parameter",
        description="How far tool calls are held to their JSON schema: `parameter` always, "
        "`function` only the call's envelope, `auto` only where a tool says strict. Calls of "
        "Llama's format (`llama3_json`, `llama4_json`) begin as ordinary JSON does: those that a "
        "model may make are held to it only where a tool says strict.",
    )
    reasoning_parser: str | None = Field(
        None, description="vLLM reasoning parser; gpt-oss has `openai_gptoss` by default."
    )

    def parsers(self, model_type: str) -> tuple[str | None, str | None]:
        """The names of the tool parser and of the reasoning parser, for a `model_type` of
        config.json. Without those of its own format a gpt-oss would answer with its markup, and
        Responses not at all."""
        if model_type == "gpt_oss":
            return self.tool_call_parser or "openai", self.reasoning_parser or "openai_gptoss"
        return self.tool_call_parser, self.reasoning_parser

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Read text as one name, or as a JSON array of names."""
        if isinstance(value, str):
            value = json.loads(value) if value.startswith("[") else [value]
        if not isinstance(value, list | tuple):
            return value
        return [name for name in value if name != ""]

    @field_validator("default_chat_template_kwargs", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Read text, from the command line or the environment, as JSON."""
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("dtype", mode="before")
    @classmethod
    def _full_name(cls, value: Any) -> Any:
        """Translate vLLM's short names of data types."""
        names = {"half": "float16", "float": "float32"}
        return names.get(value, value) if isinstance(value, str) else value
