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


@pytest.mark.parametrize(("on_cpu", "value"), [(False, "0"), (True, None)])
def test_every_engine_on_a_gpu_draws_with_the_same_kernels(
    on_cpu: bool, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: engines of a bench that want an nvcc, and vLLM's that draw with others than ours."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(commands, "resolve", lambda name: f"/converted/{name}")
    monkeypatch.setattr(commands, "_on_cpu", lambda: on_cpu)
    shared = Shared(3, {"model": NAME, "drafter": "org/head"}, "org/eagle3")
    ours, theirs = parse("off,vllm:3")
    assert command(theirs, shared, 1)[1].get(name) == value
    for method in (ours, theirs):
        assert in_process(method, shared)[1].get(name) == value
    # As the gateway's engine, where FlashInfer cannot be used.
    backend = None if on_cpu else "triton"
    assert in_process(ours, shared)[0].get("gdn_prefill_backend") == backend
