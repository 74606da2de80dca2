"""Settings that bound what one request may ask for."""

from __future__ import annotations

from pydantic import Field

from app.settings.section import Section, names_in


class LimitSettings(Section):
    """Bounds on what one request may ask for; each refusal names the field and the bound."""

    max_body_values: int | None = Field(
        None,
        ge=1,
        description="Most values in a body's JSON: numbers, texts, lists, objects (default: 65536 "
        "and one for each token of the context; 65536 of them may be lists or objects).",
    )
    max_body_depth: int = Field(
        128, ge=1, description="Deepest nesting of lists and objects in a body's JSON."
    )
    max_choices: int = Field(128, ge=1, description="Most choices of a request: `n` times prompts.")
    max_prompts: int = Field(128, ge=1, description="Most prompts of one completions request.")
    max_messages: int = Field(2048, ge=1, description="Most messages of a chat.")
    max_input_items: int = Field(
        1024,
        ge=1,
        description="Most input items of a Responses request: vLLM takes 0.1 ms to check one.",
    )
    max_content_parts: int = Field(
        4096, ge=1, description="Most content parts and tool calls of all messages together."
    )
    max_logprobs: int = Field(
        20, ge=0, le=20, description="Most alternatives per token (`logprobs`, `top_logprobs`)."
    )
    max_alternatives: int = Field(
        262144,
        ge=1,
        description="Most log probabilities that a request may ask for: tokens x (alternatives + "
        "1), summed over choices and prompts. As many as one choice can have (the context x "
        "(`max_logprobs` + 1)) are always allowed, 65536 of them for its prompt. Choices may "
        "repeat as many tokens of their prompts (`return_token_ids`, `echo`).",
    )
    max_stop_sequences: int = Field(16, ge=1, description="Most stop sequences.")
    max_stop_length: int = Field(
        1024, ge=1, description="Longest stop sequence, and longest bad word, in characters."
    )
    max_bad_words: int = Field(
        128, ge=1, le=512, description="Most entries of `bad_words`, times the number of prompts."
    )
    max_bad_words_length: int = Field(
        8192,
        ge=1,
        le=65536,
        description="Most characters of all `bad_words` together, times the number of prompts.",
    )
    max_token_list: int = Field(
        1024,
        ge=1,
        description="Most entries of `logit_bias`, `stop_token_ids` and `allowed_token_ids`.",
    )
    max_tools: int = Field(128, ge=1, description="Most tools of a request.")
    max_schema_kib: float = Field(
        64.0,
        gt=0,
        description="Largest JSON schema, grammar or tool, in KiB of text, as it was sent and as "
        "it is rewritten to be enforced; times the number of prompts.",
    )
    max_schema_depth: int = Field(
        64, ge=1, description="Deepest nesting of JSON inside a schema or tool."
    )
    max_schema_properties: int = Field(
        500,
        ge=1,
        description="Most entries of one object in a schema, and most properties that a schema "
        "lists or requires: compiling takes time that grows with their square.",
    )
    max_pattern_length: int = Field(2048, ge=1, description="Longest regular expression.")
    media_domains: str = Field(
        "",
        description="Hosts, separated by commas, that a multimodal model's requests may name in "
        "URLs; none by default. Media inside of a request (data URLs) need no host.",
    )

    def alternatives(self, context: int | None) -> int:
        """The most log probabilities of a request to a model of this context length, as far as it
        is known: no fewer than one choice can have."""
        return max(self.max_alternatives, (context or 0) * (self.max_logprobs + 1))

    @property
    def media_hosts(self) -> frozenset[str]:
        """`media_domains` as a set."""
        return frozenset(names_in(self.media_domains))
