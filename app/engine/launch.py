"""Launches an engine: makes its configuration from the settings, and starts its processes."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from importlib.metadata import entry_points
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from app.engine.configuration.cpu import cpu_machine, environment
from app.engine.configuration.engine_start import engine_start
from app.engine.configuration.head import head_method
from app.engine.configuration.options import VLLM_VERSION, set_environment
from app.engine.configuration.parsers import check_parsers
from app.engine.configuration.runner import V2, Blame, StartPath
from app.engine.configuration.server import server_config
from app.engine.configuration.weights_dtype import lasting_weights_dtype, measure
from app.engine.start_failure import StartFailureError
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


def prepare() -> bool:
    """Import vllm, and set what its processes read; returns whether the engine runs on a CPU.

    Raises StartupError for another vllm than this gateway is made for.
    """
    block_terminal_signals()
    set_environment(os.environ)
    _check_version()
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def launch(
    settings: Settings, load: EngineLoad, path: StartPath, wish: bool | None = None
) -> tuple[GatewayLLM, StepWatch]:
    """Build the configuration of an engine on a start path, and start its processes.

    `settings` are those of the path, `wish` is the runner that the operator asked for. Blocks until
    the model is loaded. The engine's processes end with the thread that calls this
    (drafters/parent_death.py), which must therefore outlast them. Raises StartupError or
    SettingsError, and whatever vLLM raises.
    """
    on_cpu = prepare()
    from app.llm.async_llm import GatewayLLM
    from app.llm.steps import StepWatch

    machine = cpu_machine() if on_cpu else None
    if machine is not None:
        os.environ.update(environment(os.environ))
        if not machine.can_compile:
            logger.warning("no C++ compiler with Python.h: the model is not compiled and slower")
    method = head_method(settings)
    options, environ = engine_start(settings, machine, method, path, wish)
    os.environ.pop(V2, None)
    os.environ.update(environ)
    options["model"] = resolve(options["model"])  # the first start converts a packaged model
    if machine is not None:
        race = partial(measure, threads=machine.threads)
        dtype = lasting_weights_dtype(options, machine.free_memory, race)
        options["dtype"] = dtype or options["dtype"]
    config = _engine_config(settings, options, path)
    _refuse_logits_processors(config)
    _refuse_undrafted(config, path)
    _refuse_unasked_lookups(config, settings)
    load.clear()
    scheduler, parallel = config.scheduler_config, config.parallel_config
    load.copies = parallel.data_parallel_size
    load.capacity = scheduler.max_num_seqs * load.copies
    steps = StepWatch(load=load)
    with children_end_with_this_process():
        llm = GatewayLLM.from_vllm_config(config, stat_loggers=[lambda *_: steps])
    return llm, steps


def _engine_config(settings: Settings, options: dict[str, Any], path: StartPath) -> Any:
    """vLLM's configuration. Raises StartupError for an argument that vLLM does not have,
    SettingsError for a parser that it does not have, and StartFailureError if V2 is what it cannot
    be made for."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        arguments = AsyncEngineArgs(**options)  # loads vLLM's plugins, which may bring parsers
    except TypeError as error:
        raise StartupError(f"engine_args: {error}") from error
    check_parsers(settings)
    try:
        return server_config(arguments)
    except (NotImplementedError, ValueError) as error:
        if path is not StartPath.V2:
            raise
        arguments.create_model_config()  # without the model no runner runs: that error is raised
        reason = " ".join(str(error).split())
        raise StartFailureError(reason, Blame.UNSUPPORTED, "unsupported") from error


def block_terminal_signals() -> None:
    """Block SIGINT and SIGHUP in the processes that this thread starts, which inherit its mask.

    Ctrl-C in a terminal, and the terminal's end, reach the whole process group. They must drain the
    gateway rather than kill its engine.
    """
    from_terminal = {signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, from_terminal)
    resource_tracker.ensure_running()  # later it would unblock SIGINT again in the thread it is in
    signal.pthread_sigmask(signal.SIG_BLOCK, from_terminal)


def _refuse_logits_processors(config: Any) -> None:
    """Raise StartupError for logits processors beside drafts: drafted tokens would escape them.
    Beside lookups, which nobody asked for, it is a StartFailureError, and no drafts follow.

    On V1 the engine refuses them too (drafters/vllm/v1/runner.py), but in another process, where
    the reason is lost.
    """
    if config.speculative_config is None:
        return
    named = [str(name) for name in config.model_config.logits_processors or ()]
    named += [f"{point.value} (installed)" for point in entry_points(group=LOGITS_PROCESSORS)]
    if named:
        problem = f"logits_processors: {', '.join(named)}: they are not applied to drafted tokens"
        if _looks_up(config):
            raise StartFailureError(problem, Blame.UNSUPPORTED, "unsupported")
        raise StartupError(f"{problem}; serve them with --k 0")


def _refuse_undrafted(config: Any, path: StartPath) -> None:
    """Raise StartupError for options beside which no drafter can draft, before anything is loaded.
    Logs what our drafter does otherwise than the configuration says.

    The drafter refuses them too, but after the target was loaded. On V2 it is a StartFailureError:
    V1 may run what V2 cannot. So it is for lookups, which nobody asked for: no drafts follow.
    """
    from drafters.vllm.own_drafter import limits_of

    try:
        for sentence in limits_of(config):
            logger.info("%s", sentence)
    except NotImplementedError as error:
        if path is StartPath.V2 or _looks_up(config):
            raise StartFailureError(str(error), Blame.UNSUPPORTED, "unsupported") from error
        raise StartupError(f"{error}; without drafts it is served with --k 0") from error


def _refuse_unasked_lookups(config: Any, settings: Settings) -> None:
    """Raise StartFailureError for lookups in a target with recurrent layers, unless `lookup_k` was
    given. Logs what drafts take of such a target's memory.

    A request has a state for each draft token beside those that it has without drafts: with
    Qwen3-Next and a `lookup_k` of 10 they take 520 MiB, where they took 75.
    """
    if config.speculative_config is None or not config.model_config.is_hybrid:
        return
    if _looks_up(config) and not settings.speculation.asks_for_lookups:
        raise StartFailureError(
            "lookups would take several times the memory of a request in a target with recurrent "
            "layers, and fewer requests would run at once: give --lookup-k to have them",
            Blame.UNSUPPORTED,
            "unsupported",
        )
    logger.info(
        "each request has %d more states of every recurrent layer than without drafts",
        config.num_speculative_tokens,
    )


def _looks_up(config: Any) -> bool:
    """Whether a configuration has drafts by lookup, without a head."""
    from drafters.vllm.own_drafter import looks_up

    return looks_up(config.speculative_config)


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
