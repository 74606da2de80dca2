"""Where a request may hold a schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def form(**held: Any) -> Json:
    return {"type": "json_schema", **held}


def tag(schema: Any) -> Json:
    return {"type": "structural_tag", "format": form(json_schema=schema)}


# Dialect, the fields that hold a schema, and its place.
HOLDERS: list[tuple[str, Callable[[Any], Json], str]] = [
    (
        "chat",
        lambda schema: {"response_format": form(json_schema={"name": "x", "schema": schema})},
        "response_format.json_schema.schema",
    ),
    (
        "completions",
        lambda schema: {"structured_outputs": {"json": json.dumps(schema)}},
        "structured_outputs.json",
    ),
    (
        "completions",
        lambda schema: {"structured_outputs": {"structural_tag": json.dumps(tag(schema))}},
        "structured_outputs.structural_tag.format.json_schema",
    ),
    (
        "responses",
        lambda schema: {"text": {"format": form(name="x", schema=schema)}},
        "text.format.schema",
    ),
    (
        "messages",
        lambda schema: {"output_config": {"format": form(schema=schema)}},
        "output_config.format.schema",
    ),
]
