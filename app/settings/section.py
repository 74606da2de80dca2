"""The base class of every section of the settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the settings, frozen and strict: an unknown name is an error, and so is a
    number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def items_in(text: str) -> tuple[str, ...]:
    """The items of a list that is separated by commas."""
    items = (item.strip() for item in text.split(","))
    return tuple(item for item in items if item)


def names_in(text: str) -> tuple[str, ...]:
    """The items of a list that is separated by commas, in lower case."""
    return tuple(item.lower() for item in items_in(text))
