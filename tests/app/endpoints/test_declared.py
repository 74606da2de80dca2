"""The declarations as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import app.endpoints
from app.declaration.endpoint import answers_for
from app.endpoints import declared

APP = Path(app.endpoints.__file__).parents[1]


def test_names_paths_and_fields_of_invocations_are_unique() -> None:
    endpoints = declared()
    assert len(endpoints) >= 7
    for values in (
        [endpoint.name for endpoint in endpoints],
        [endpoint.path for endpoint in endpoints],
        [each.invocation_field for each in endpoints if each.invocation_field is not None],
    ):
        assert len(set(values)) == len(values)


def test_what_generates_has_a_limit_and_what_does_not_has_none() -> None:
    for endpoint in declared():
        assert bool(endpoint.output_limit) == endpoint.generates, endpoint.name


def test_paths_below_an_endpoints_answer_as_it_does() -> None:
    endpoints = declared()
    [messages] = [endpoint for endpoint in endpoints if endpoint.name == "messages"]
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert answers_for(path, endpoints).error_name == messages.answers.error_name
    assert answers_for("/v1/models", endpoints).error_name == "Error"


def test_declarations_and_routes_need_no_vllm() -> None:
    """The port is open, and /livez answers, before vllm is imported."""
    script = (
        "import sys, app.endpoints, app.server.run\n"
        "assert app.endpoints.declared()\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=APP.parent, timeout=120)


def test_nothing_else_tells_endpoints_apart() -> None:
    """No comparison with an endpoint's name outside of the declarations."""
    names = {endpoint.name for endpoint in declared()}
    found = []
    for file in APP.rglob("*.py"):
        if "endpoints" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(part, ast.Constant) and part.value in names
                for side in (node.left, *node.comparators)
                for part in ast.walk(side)
            ):
                found.append(f"{file.relative_to(APP.parent)}:{node.lineno}")
    assert found == []
