"""The open user turn of a chat template: the text before the user's first word, and the turn's end.

A model that was tuned on conversations writes a user's turn when its prompt ends where the turn
begins (Magpie, Xu et al. 2024, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SENTINEL = "Aerie7sentinel3content"  # no template writes or rewrites this


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A rendered conversation up to the user's first word, and the end of the user's turn."""

    prefix: str
    end_text: str  # what the template writes behind the turn: a special token's name, or text
    end_token: int | None  # None if the template ends the turn with text of no special token

    def encode(self, tokenizer: Any, opening: str) -> list[int]:
        """Token ids of the prefix and the turn's first words."""
        # A space before a word is part of the word's token, so it must not stand alone.
        text = self.prefix + opening if opening else self.prefix.rstrip(" ")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def open_turn(
    tokenizer: Any, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> OpenTurn:
    """Find the open user turn by rendering a conversation whose user says a known word.

    `system` None leaves the system prompt to the template, whose arguments are `template_kwargs`.
    Raises ValueError if there is no chat
    template, if it has no system role, or if the user's text cannot be found in what it renders.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, so it has no user turn to be written; "
            "give a chat model, or your own prompts to aerie train"
        )
    messages = [{"role": "user", "content": _SENTINEL}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **(template_kwargs or {})
        )
    except Exception as error:  # a template may raise anything
        what = "a user's turn" if system is None else "a system prompt"
        raise ValueError(f"the chat template refuses {what}: {error}") from error
    prefix, *rest = text.split(_SENTINEL)
    if len(rest) != 1:
        raise ValueError(f"the chat template writes the user's text {len(rest)} times, not once")
    if system and system.strip() not in prefix:
        raise ValueError("the chat template leaves the system prompt out")
    end = rest[0].strip()
    if not end:
        raise ValueError("the chat template writes nothing behind the user's text")
    names = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    starts = [name for name in names if end.startswith(name)]
    if starts:
        name = max(starts, key=len)
        return OpenTurn(prefix, name, names[name])
    return OpenTurn(prefix, end.splitlines()[0].strip(), None)
