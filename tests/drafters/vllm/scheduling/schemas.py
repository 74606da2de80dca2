"""Constraints on an answer, of all kinds that a request may name, for tests of forced spans."""

from __future__ import annotations

import json
from random import Random
from typing import Any

FIELDS = (
    "name", "category_of_item", "street_address", "created_at", "isActive", "größe", "名前", "x",
    "total_amount_in_euro", "is_verified", "latitude", "customerName", "a b", "tags",
)  # fmt: skip
WORDS = ("positive", "negative", "neutral", "élan", "école", "in progress", "done", "日本", "日曜")


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """A JSON schema of an object with two to five required fields, nested up to `depth`."""
    names = random.sample(FIELDS, random.randint(2, 5))
    return {
        "type": "object",
        "properties": {name: _value(random, depth - 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _value(random: Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "const", "null"]
    kind = random.choice(kinds + ["object", "array"] * (depth > 0))
    if kind == "object":
        return random_schema(random, depth)
    if kind == "array":
        return {"type": "array", "items": _value(random, depth - 1), "minItems": 1, "maxItems": 3}
    if kind == "string":
        return {"type": "string", "maxLength": 12}
    if kind == "enum":
        return {"enum": random.sample(WORDS, 3)}
    if kind == "const":
        return {"const": random.choice(WORDS)}
    return {"type": kind}


def other_constraints() -> list[dict[str, Any]]:
    """Entries of `structured_outputs` that are no schema: regex, choice, grammar and tag."""
    arguments = random_schema(Random(1), depth=1)
    tag = {
        "begin": '<call>{"name": "get_weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": arguments},
        "end": "}</call>",
    }
    tags = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    return [
        {"regex": r"Invoice number: \d{4}-[A-Z]{2}, paid: (yes|no)\."},
        {"regex": "(à la carte|él primero|éa)"},
        {"choice": ["positive sentiment", "negative sentiment", "nothing to say"]},
        {"grammar": 'root ::= "SELECT " col " FROM customers WHERE id = " [0-9]+\n'
                    'col ::= "first_name" | "last_name"'},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": tags})},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "tag"} | tag})},
    ]  # fmt: skip
