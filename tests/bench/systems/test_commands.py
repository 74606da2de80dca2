"""Command lines of the servers that are compared."""

from __future__ import annotations

import pytest

from bench.systems import commands
from bench.systems.commands import Shared, command, in_process
from bench.systems.method import parse

NAME = "packaged:smollm2-135m"


def test_vllm_gets_the_folder_of_a_packaged_model_and_the_gateway_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway converts it itself; vLLM would ask the hub for a model of that name."""
    monkeypatch.setattr(commands, "resolve", lambda name: f"/converted/{name}")
    monkeypatch.setattr(commands, "_on_cpu", lambda: False)
    shared = Shared(3, {"model": NAME, "drafter": "org/head"}, "org/eagle3")
    ours, theirs = parse("off,vllm:3")
    assert f"--model=/converted/{NAME}" in command(theirs, shared, 1)[0]
    assert f"--model={NAME}" in command(ours, shared, 1)[0]
    for method in (ours, theirs):
        assert in_process(method, shared)[0]["model"] == f"/converted/{NAME}"
