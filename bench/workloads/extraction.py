"""Extraction: facts of a quoted text or file as JSON, by a schema (`response_format`).

Texts and lists of a schema are bounded, so that an answer ends: a small model goes on for ever
where it may.
"""

from __future__ import annotations

from typing import Any

from bench.workloads.code_edits import source_files
from bench.workloads.constraints import json_schema
from bench.workloads.embedded import fenced
from bench.workloads.prompt import Prompt
from bench.workloads.quoted_texts import texts


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_FUNCTION = _object(
    function_name=_text(40),
    parameters=_list(
        _object(
            name=_text(24),
            kind={"enum": ["positional", "keyword_only", "variadic"]},
            has_default={"type": "boolean"},
        ),
        4,
    ),
    description=_text(120),
    called_functions=_list(_text(30), 4),
    returns_a_value={"type": "boolean"},
)
_FILE = _object(
    programming_language={"enum": ["python", "c", "rust"]},
    functions=_list(_object(name=_text(40), first_statement=_text(80)), 3),
    imported_modules=_list(_text(24), 3),
    number_of_functions={"type": "integer", "minimum": 0, "maximum": 20},
)
_PAGE = _object(
    title=_text(60),
    first_sentence=_text(160),
    technical_terms=_list(_text(30), 5),
    mentions_exceptions={"type": "boolean"},
    difficulty={"enum": ["beginner", "intermediate", "expert"]},
)
_RULES = _object(
    subject=_text(40),
    rules=_list(
        _object(condition=_text(80), consequence=_text(80), certain={"type": "boolean"}), 3
    ),
    see_also=_list(_text(30), 3),
)
_OF_CODE = (
    ("Extract the facts of the last function of this file as JSON.", _FUNCTION),
    ("Extract the facts of this file as JSON.", _FILE),
)
_OF_TEXTS = (
    ("Extract the facts of this text as JSON.", _PAGE),
    ("Extract the rules that this text states as JSON.", _RULES),
)


def extraction() -> list[Prompt]:
    """A prompt for each text and each file, with its schema. Raises ValueError without HumanEval's
    package."""
    prompts = []
    quotes = [(_OF_CODE, fenced(file)) for file in source_files()]
    quotes += [(_OF_TEXTS, text) for text in texts()]
    for number, (requests, quoted) in enumerate(quotes):
        request, schema = requests[number % 2]
        keys = ", ".join(schema["properties"])
        content = f"{request} Its keys are {keys}.\n\n{quoted}"
        prompts.append(
            Prompt(
                messages=({"role": "user", "content": content},),
                extra_body=json_schema("facts", schema),
            )
        )
    return prompts
