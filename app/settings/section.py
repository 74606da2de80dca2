"""The base class of every section of the settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the settings, frozen and strict: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def names_in(text: str) -> tuple[str, ...]:
    """The names in a list that is separated by commas, in lower case."""
    names = (name.strip().lower() for name in text.split(","))
    return tuple(name for name in names if name)
