"""Every numeric field, given numbers out of its range; one field of each route, given what is no
number."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .bodies import CHAT, COMPLETIONS, RESPONSES, Raw, send
from .wire import JSON, assert_error

# Every numeric field of a route: the values that its range forbids.
NUMBERS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "temperature": [3, -1, 1e30],
        "top_p": [2, -0.1],
        "n": [0, -1, 100_000, 1.5],
        "max_tokens": [0, -1, 10**30, 1.5],
        "max_completion_tokens": [0, -1, 10**30, 1.5],
        "presence_penalty": [-3, 3],
        "frequency_penalty": [-3, 3],
        "seed": [10**30, 1.5],
        "top_logprobs": [21, -1, 10**30, 1.5],
    },
    COMPLETIONS: {
        "temperature": [3, -1],
        "top_p": [2, -0.1],
        "n": [0, -1, 100_000],
        "max_tokens": [-1, 10**30, 1.5],
        "presence_penalty": [-3, 3],
        "frequency_penalty": [-3, 3],
        "seed": [10**30],
        "logprobs": [-1, 10**30, 1_000],
    },
    RESPONSES: {
        "temperature": [3, -1],
        "top_p": [2, -0.1],
        "max_output_tokens": [0, -1, 10**30, 1.5],
        "top_logprobs": [21, -1],
    },
}
# Fields that are given what is no number. The others: tests/app/validation/test_field_checks.py.
ONE_OF_A_ROUTE = {CHAT: "max_tokens", COMPLETIONS: "temperature", RESPONSES: "top_logprobs"}
NOT_NUMBERS: list[Any] = ["many", "", True, [], {}, Raw("NaN"), Raw("1e400"), Raw("-1e400")]


def number_cases() -> list[Any]:
    return [
        pytest.param(path, field, value, id=f"{path}-{field}-{value!r:.12}")
        for path, fields in NUMBERS.items()
        for field, forbidden in fields.items()
        for value in [*forbidden, *(NOT_NUMBERS if field == ONE_OF_A_ROUTE[path] else ())]
    ]


@pytest.mark.parametrize(("path", "field", "value"), number_cases())
def test_numbers_out_of_range_or_no_numbers(
    http: httpx.Client, path: str, field: str, value: Any
) -> None:
    changes: JSON = (
        {field: value, "logprobs": True}
        if field == "top_logprobs" and path == CHAT
        else {field: value}
    )
    # NaN is no JSON at all, so then the body as a whole may be what is refused.
    params = {field, None} if isinstance(value, Raw) else {field}
    assert_error(send(http, path, changes, streaming=False), 400, param=params)
