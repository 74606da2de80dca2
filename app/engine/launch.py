"""Launches an engine: makes its configuration from the settings, and starts its processes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from app.engine.configuration.cpu import cpu_machine, environment
from app.engine.configuration.head import head_method
from app.engine.configuration.options import V2, VLLM_VERSION, engine_options, wants_v2
from app.engine.configuration.server import server_config, this_gpu
from app.engine.configuration.weights_dtype import lasting_weights_dtype, measure
from app.errors import StartupError
from app.llm.engine_load import EngineLoad
from app.settings import Settings
from drafters.packaged import resolve
from drafters.parent_death import children_end_with_this_process

if TYPE_CHECKING:
    from app.llm.async_llm import GatewayLLM
    from app.llm.steps import StepWatch

logger = logging.getLogger(__name__)

LOGITS_PROCESSORS = "vllm.logits_processors"  # vLLM's group of installed ones


def launch(
    settings: Settings, load: EngineLoad, loading: Callable[[], None]
) -> tuple[GatewayLLM, StepWatch]:
    """Import vllm, call `loading`, then build the engine's configuration and start its processes.

    Blocks until the model is loaded. The engine's processes end with the thread that calls this
    (drafters/parent_death.py), which must therefore outlast them. Raises StartupError.
    """
    block_terminal_signals()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # An allowed host could redirect the gateway to one that is not allowed.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    _check_version()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from app.llm.async_llm import GatewayLLM
    from app.llm.steps import StepWatch

    loading()
    machine = cpu_machine() if current_platform.is_cpu() else None
    if machine is not None:
        os.environ.update(environment(os.environ))
        if not machine.can_compile:
            logger.warning("no C++ compiler with Python.h: the model is not compiled and slower")
    method = head_method(settings)
    if settings.speculates and method == "eagle3":
        _stay_on_v1()
    try:
        options = engine_options(
            settings, machine, method=method, v2=wants_v2(os.environ), gpu=this_gpu()
        )
        options["model"] = resolve(options["model"])  # the first start converts a packaged model
        if machine is not None:
            race = partial(measure, threads=machine.threads)
            dtype = lasting_weights_dtype(options, machine.free_memory, race)
            options["dtype"] = dtype or options["dtype"]
        arguments = AsyncEngineArgs(**options)
        config = server_config(arguments)
    except TypeError as error:
        raise StartupError(f"engine_args: {error}") from error
    _refuse_logits_processors(config)
    _refuse_undrafted(config)
    load.clear()
    scheduler, parallel = config.scheduler_config, config.parallel_config
    load.capacity = scheduler.max_num_seqs * parallel.data_parallel_size
    steps = StepWatch(load=load)
    with children_end_with_this_process():
        llm = GatewayLLM.from_vllm_config(config, stat_loggers=[lambda *_: steps])
    return llm, steps


def block_terminal_signals() -> None:
    """Block SIGINT and SIGHUP in the processes that this thread starts, which inherit its mask.

    Ctrl-C in a terminal, and the terminal's end, reach the whole process group. They must drain the
    gateway rather than kill its engine.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})


def _stay_on_v1() -> None:
    """Keep vLLM on its V1 model runner for EAGLE-3: it prefers V2, where no drafter here runs one.

    Raises StartupError if that runner was asked for.
    """
    if wants_v2(os.environ):
        raise StartupError(
            f"{V2}=1: EAGLE-3 heads run on vLLM's V1 model runner only; unset it, or name a "
            "P-EAGLE head"
        )
    os.environ[V2] = "0"


def _refuse_logits_processors(config: Any) -> None:
    """Raise StartupError for logits processors beside drafts: drafted tokens would escape them.

    The engine refuses them too (drafters/vllm/patches.py), but in another process, where the reason
    is lost.
    """
    if config.speculative_config is None:
        return
    named = [str(name) for name in config.model_config.logits_processors or ()]
    named += [f"{point.value} (installed)" for point in entry_points(group=LOGITS_PROCESSORS)]
    if named:
        raise StartupError(
            f"logits_processors: {', '.join(named)}: they are not applied to drafted tokens; serve "
            "them with --k 0"
        )


def _refuse_undrafted(config: Any) -> None:
    """Raise StartupError for options beside which no drafter can draft, before anything is loaded.

    The drafter refuses them too, but in another process, where the reason is lost.
    """
    from drafters.vllm.own_drafter import refuse

    try:
        refuse(config)
    except NotImplementedError as error:
        raise StartupError(f"{error}; without drafts it is served with --k 0") from error


def versions(llm: GatewayLLM) -> dict[str, str]:
    """Device, data type and versions: what step costs of `llm` depend on beside the settings."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "dtype": str(llm.model_config.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def _check_version() -> None:
    import vllm

    if not vllm.__version__.startswith(VLLM_VERSION):
        raise StartupError(
            f"vllm {vllm.__version__} is installed, this gateway is made for {VLLM_VERSION}: "
            "run `make install`"
        )
