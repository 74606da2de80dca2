"""What an engine is started with on a start path: vLLM's arguments, and the environment."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from app.engine.configuration import cuda
from app.engine.configuration.cpu import CpuMachine
from app.engine.configuration.options import engine_options
from app.engine.configuration.runner import V2, StartPath
from app.engine.configuration.server import this_gpu
from app.settings import Settings
from drafters.model.config import Method

logger = logging.getLogger(__name__)

# vLLM's own limit of a step, for engines with several workers (vllm/envs.py), and its default.
STEP_TIMEOUT, STEP_TIMEOUT_S = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 300


def engine_start(
    settings: Settings,
    machine: CpuMachine | None,
    method: Method,
    path: StartPath,
    wish: bool | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """(engine arguments, environment) of an engine on a start path.

    `machine` has the facts of a CPU, and is None on a GPU. `method` is how the head drafts, `wish`
    the runner that the operator asked for. The environment is this process's, with vLLM's variable
    for the path's runner or without it, with a limit of vLLM's that lets a step last for longer
    than `hang_timeout_s`, and on a GPU with those that go without a CUDA compiler. An engine's
    process caches vLLM's variables (vllm/envs.py, enable_envs_cache): they must be set
    before it is started.
    """
    gpu = this_gpu() if machine is None else None
    options = engine_options(settings, machine, method=method, v2=path is StartPath.V2, gpu=gpu)
    if machine is None and not _has_flashinfer():
        options = cuda.WITHOUT_FLASHINFER | options
    environ = {name: value for name, value in os.environ.items() if name != V2}
    if (runner := path.runner(wish)) is not None:
        environ[V2] = runner
    hang_timeout_s = math.ceil(settings.supervision.hang_timeout_s)
    environ.setdefault(STEP_TIMEOUT, str(max(STEP_TIMEOUT_S, hang_timeout_s + 60)))
    if machine is None:
        environ |= cuda.environment(environ)
    return options, environ


def _has_flashinfer() -> bool:
    """Whether vLLM can use FlashInfer on this machine. Logs what follows if it cannot."""
    from vllm.utils.flashinfer import has_flashinfer

    if has_flashinfer():
        return True
    logger.info(
        "FlashInfer is not used: it is not installed, or lacks both compiled kernels and nvcc with "
        "ninja. Attention and mixtures of experts run on the next of vLLM's kernels"
    )
    return False
