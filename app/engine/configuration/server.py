"""vLLM's configuration of a server: its defaults on this machine, and what is set right in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.engine.configuration.capacity import ServerDefaults, StepShape, estimate_graphs, graphs_of
from drafters.model.config import Method

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

logger = logging.getLogger(__name__)


def this_gpu(world_size: int = 1) -> ServerDefaults | None:
    """What vLLM gives its own server on this machine's GPUs; None on a CPU."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    if current_platform.is_cpu():
        return None
    server = UsageContext.OPENAI_API_SERVER
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(world_size)
    return ServerDefaults(tokens[server], sequences[server])


def server_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Build vLLM's configuration of a server from its arguments. Logs how many CUDA graphs are to
    be captured, and about what that takes.

    On a GPU it has a server's defaults; on a CPU those that vLLM has for its class LLM.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    structured: Any = arguments.structured_outputs_config
    if isinstance(structured, Mapping):  # vLLM sets the reasoning parser as an attribute of it
        arguments.structured_outputs_config = StructuredOutputsConfig(**structured)
    speculation: Any = arguments.speculative_config
    config = arguments.create_engine_config(
        None if current_platform.is_cpu() else UsageContext.OPENAI_API_SERVER
    )
    if isinstance(speculation, dict):
        _restore_table(config, speculation.get("num_speculative_tokens_per_batch_size"))
    _log_graphs(config)
    return config


def _restore_table(config: VllmConfig, table: Any) -> None:
    """Give the configuration its table of K back, from which vLLM takes the K that get graphs.

    With data parallelism vLLM drops it, as ranks that choose different K would wait for each other
    for ever (config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel). That holds for experts
    that ranks share. Ranks of a dense target are engines of their own (v1/engine/core.py,
    run_engine_core).
    """
    if config.speculative_config is not None and not config.model_config.is_moe:
        config.speculative_config.num_speculative_tokens_per_batch_size = table


def _log_graphs(config: VllmConfig) -> None:
    """Log an estimate of the CUDA graphs, where the V2 model runner drafts."""
    speculation, scheduler = config.speculative_config, config.scheduler_config
    sizes = config.compilation_config.cudagraph_capture_sizes
    if speculation is None or not sizes or not config.use_v2_model_runner:
        return
    k = config.num_speculative_tokens
    method: Method | None = "p-eagle" if speculation.parallel_drafting else "eagle3"
    if not speculation.use_eagle():
        method = None
    shape = StepShape(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, sizes)
    layers, head_layers = (
        model.hf_text_config.num_hidden_layers
        for model in (config.model_config, speculation.draft_model_config)
    )
    estimate = estimate_graphs(graphs_of(shape, k, method), k, method, layers, head_layers)
    logger.info("CUDA graphs to capture: %s", estimate)
