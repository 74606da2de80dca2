"""Write docs/fields.md from the modules of app/endpoints: python -m docs.fields"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from app.declaration.endpoint import Endpoint
from app.endpoints import declared
from app.validation.fields import (
    MAX_BEAM_TOKENS,
    MAX_LENGTH_PENALTY,
    NOT_WITH_BEAMS,
    ONLY_WITH_BEAMS,
    NotAt,
    OnlyAt,
    Rule,
    SameAs,
)
from app.validation.speculation_field import FIELD

PAGE = Path(__file__).with_name("fields.md")
TEXT = """\
# Request fields

Made from `app/endpoints/` by `python -m docs.fields`; a test keeps it so.

Each field of a request is honoured, accepted without effect, or refused with a 400 that names it.
A field that is not on this page is refused as unknown. A null is a field that is not given, at any
depth. `GET /openapi.json` says the same in JSON schemas.

A `tool_choice` of type `allowed_tools` (chat, Responses) leaves the tools that it names, as if the
request had no others, and counts as its `mode`: `auto` or `required`.

{beams}

{dialects}
"""


def page() -> str:
    """The page as it should be."""
    return TEXT.format(beams=_filled(_beams()), dialects="\n\n".join(map(_section, declared())))


def _beams() -> str:
    names = ", ".join(f"`{name}`" for name in NOT_WITH_BEAMS)
    alone = ", ".join(f"`{name}`" for name in ONLY_WITH_BEAMS)
    return (
        "With `use_beam_search` these are refused, since a beam search does not apply them: "
        f"{names}, `strict` of a tool, and `vllm_xargs`. Of `tool_choice`, `auto` and `none` are "
        "taken. It looks at twice `n` tokens at each position: `logprobs` and `top_logprobs` are "
        "at most that, and `n` times the limit of the output is at most "
        f"{MAX_BEAM_TOKENS}. `length_penalty` is between -{MAX_LENGTH_PENALTY} and "
        f"{MAX_LENGTH_PENALTY}. Without `use_beam_search` these are refused: {alone}, unless 1."
    )


def _filled(text: str) -> str:
    return fill(text, width=100, break_on_hyphens=False, break_long_words=False)


def _section(endpoint: Endpoint) -> str:
    rules = endpoint.fields
    known = {name for model in endpoint.models() for name in model.model_fields}
    taken = (known - set(rules)) | ({FIELD} if endpoint.generates else set())
    effect = {name: "without effect" if name in endpoint.unused else "honoured" for name in rules}
    rows = "\n".join(_row(name, rule, effect[name]) for name, rule in sorted(rules.items()))
    text = _filled(f"Honoured: {_names(taken - endpoint.unused)}.")
    if unused := taken & endpoint.unused:
        text += "\n\n" + _filled(f"Checked, and without effect on the answer: {_names(unused)}.")
    return (
        f"## `POST {endpoint.path}`\n\n{text}\n\n| field | treatment | why |\n|---|---|---|\n{rows}"
    )


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields))


def _row(name: str, rule: Rule, effect: str) -> str:
    if isinstance(rule, OnlyAt):
        values = " or ".join(f"`{json.dumps(value)}`" for value in rule.values)
        treatment = f"refused unless {values}" if values else "refused"
    elif isinstance(rule, NotAt):
        values = " and ".join(f"`{json.dumps(value)}`" for value in rule.values)
        treatment = f"{effect}, {values} refused"
    elif isinstance(rule, SameAs):
        treatment = f"the same as `{rule.name}`"
    else:
        treatment = "without effect"
    return f"| `{name}` | {treatment} | {rule.why} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
