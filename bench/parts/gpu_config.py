"""`aerie bench gpu-config`: what vLLM's configuration is on GPUs that are not here.

Builds it for each preset as `aerie serve` does, with the targets' shapes and without weights, and
asks vLLM's own graph managers what they would capture. One line for each preset and kind of GPU,
with as many GPUs as the preset needs of that kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.engine.configuration.capacity import ServerDefaults, estimate_graphs
from app.engine.configuration.options import engine_options
from app.engine.configuration.runner import V2, StartPath, start_plan
from app.engine.configuration.server import server_config, this_gpu
from app.presets.about import about_preset
from app.presets.memory import fewest_gpus, need
from app.settings import REPOSITORY, Settings, of_preset, preset_names
from bench.errors import reports_errors
from bench.parser import command_parser
from bench.parts.gpu_platform import GPUS, pretend
from bench.systems.model_free import head_config
from bench.systems.target_configs import BY_MODEL
from drafters.graph_sizes import GraphCounts
from drafters.markdown import columns
from drafters.model.config import Method

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REASONING_MARKS = ("<think>", "</think>", "<|channel>", "<channel|>")  # Qwen3's and Gemma 4's


class Case(NamedTuple):
    """A preset on GPUs of one kind."""

    preset: str
    gpu: str  # a name of GPUS
    data_parallel: int = 1
    given: Mapping[str, Any] | None = None  # engine arguments of an operator
    head: bool = True  # with the preset's head, if it has one
    flashinfer: bool = False  # its kernels can be used: there is an nvcc


class Configuration(NamedTuple):
    """The configuration of a case."""

    preset: str
    gpu: str
    gpus: int  # of one replica
    defaults: ServerDefaults | None  # of vLLM's own server there
    runner: str
    backends: list[str]  # attention of the target's kinds of layers
    head_backend: str
    head_threshold: int | None  # tokens of a request that the head's backend decodes at once
    tokens: int
    sequences: int
    sizes: list[int]
    mode: str  # of CUDA graphs
    ks: list[int]  # that vLLM's table names
    counts: GraphCounts
    without_graph: int  # pairs of requests and K of `ks` whose decode step is no whole graph
    seconds: float
    graphs_gib: float
    memory_gib: float | None


def outcomes(cases: Sequence[Case]) -> list[Configuration]:
    """Build the configuration of each case, in their order. This process imports vLLM as on the
    first kind of GPU, and stays on it; each kind of machine has a child process of its own."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    kinds = list(dict.fromkeys((case.gpu, case.flashinfer) for case in cases))
    pretend(GPUS[kinds[0][0]], flashinfer=True)
    import vllm.v1.attention.backends.flash_attn
    import vllm.v1.attention.backends.flashinfer
    import vllm.v1.worker.gpu.model_runner  # noqa: F401
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    # vLLM looks at a new architecture in a process that imports all of vLLM, and keeps what it saw
    # in a file: children that meet the same one wait for the first.
    one_at_a_time, inspect = get_context("fork").Lock(), _LazyRegisteredModel.inspect_model_cls

    def inspect_model_cls(model: _LazyRegisteredModel) -> Any:
        with one_at_a_time:
            return inspect(model)

    _LazyRegisteredModel.inspect_model_cls = inspect_model_cls
    groups = [[case for case in cases if (case.gpu, case.flashinfer) == kind] for kind in kinds]
    with get_context("fork").Pool(len(groups), maxtasksperchild=1) as pool:
        built = dict(zip(kinds, map(iter, pool.map(_build_all, groups, 1)), strict=True))
    return [next(built[case.gpu, case.flashinfer]) for case in cases]


def _build_all(cases: Sequence[Case]) -> list[Configuration]:
    """Build cases of one kind of machine."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    torch.set_num_threads(1)
    pretend(GPUS[cases[0].gpu], flashinfer=cases[0].flashinfer)
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        # vLLM's managers of graphs ask whether this is the first and last of the ranks.
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return [_build(case, Path(folder) / str(index)) for index, case in enumerate(cases)]


def _build(case: Case, folder: Path) -> Configuration:
    """Build one case, with the models' files in `folder`."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs

    from drafters.vllm.own_drafter import refuse

    about, preset = about_preset(case.preset), of_preset(case.preset)
    gib = GPUS[case.gpu].gib
    if not case.head:
        without = preset.speculation.model_copy(update={"drafter": None})
        preset = preset.model_copy(update={"speculation": without})
    gpus = fewest_gpus(preset, about, gib) or 8
    method: Method | None = None
    if preset.has_head:
        method = about.head.method if about.head else "p-eagle"
    taps = about.head.taps if about.head else 3
    settings = _with_models(preset, method, taps, folder)
    parallel = {"tensor_parallel_size": gpus, "data_parallel_size": case.data_parallel}
    given = settings.engine.engine_args | parallel | dict(case.given or {})
    engine = settings.engine.model_copy(update={"engine_args": given})
    settings = settings.model_copy(update={"engine": engine})
    for path in start_plan(settings, on_cpu=False, wish=None).paths:
        os.environ[V2] = str(path.runner(None))
        v2 = path is StartPath.V2
        options = engine_options(settings, method=method or "p-eagle", v2=v2, gpu=this_gpu())
        config = server_config(AsyncEngineArgs(**options))
        with contextlib.suppress(NotImplementedError):  # the next path, as at a start
            refuse(config)
            break
    with set_current_vllm_config(config):
        backends, head_backend, threshold = _attention(config)
        counts, mode, without_graph = _graphs(config, method)
    k, speculation = config.num_speculative_tokens, config.speculative_config
    layers, head_layers = (
        model.hf_text_config.num_hidden_layers
        for model in (config.model_config, speculation.draft_model_config)
    )
    estimate = estimate_graphs(counts, k, method, layers, head_layers)
    needed = need(preset, about, gpus, gib)
    return Configuration(
        preset=case.preset,
        gpu=case.gpu,
        gpus=gpus,
        defaults=this_gpu(),
        runner="V2" if config.use_v2_model_runner else "V1",
        backends=backends,
        head_backend=head_backend,
        head_threshold=threshold,
        tokens=config.scheduler_config.max_num_batched_tokens,
        sequences=config.scheduler_config.max_num_seqs,
        sizes=config.compilation_config.cudagraph_capture_sizes,
        mode=mode,
        ks=[entry[2] for entry in speculation.num_speculative_tokens_per_batch_size or ()],
        counts=counts,
        without_graph=without_graph,
        seconds=estimate.seconds,
        graphs_gib=estimate.gib,
        memory_gib=needed.total if needed else None,
    )


def _with_models(preset: Settings, method: Method | None, taps: int, folder: Path) -> Settings:
    """The preset's settings, with folders that have its models' configurations and no weights."""
    document = BY_MODEL.get(preset.model.model)
    if document is None:  # inside this repository
        target, head = (
            REPOSITORY / str(name) for name in (preset.model.model, preset.speculation.drafter)
        )
    else:
        target, head = folder / "target", folder / "head"
        _write_config(target, document)
        if method is not None:
            _write_config(head, head_config(document, method, taps))
        _write_tokenizer(target)
    model = preset.model.model_copy(update={"model": str(target)})
    drafter = None if method is None else str(head)
    speculation = preset.speculation.model_copy(update={"drafter": drafter})
    return preset.model_copy(update={"model": model, "speculation": speculation})


def _write_config(folder: Path, document: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(document), "utf-8")


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that has the marks of reasoning, which vLLM looks up."""
    from tokenizers import Tokenizer

    source = REPOSITORY / "models" / "embedded" / "target"
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(list(REASONING_MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(source / "tokenizer_config.json", folder / "tokenizer_config.json")


def _attention(config: VllmConfig) -> tuple[list[str], str, int | None]:
    """Names of the attention backends of the target's kinds of layers, which vLLM selects, and of
    the head, and how many tokens of a request the head's decodes at once; None: any number. Without
    a head, one of the target's stands for it."""
    from vllm.v1.attention.backend import max_decode_query_len
    from vllm.v1.attention.selector import get_attn_backend

    from drafters.vllm.own_drafter import head_backend

    model, speculation = config.model_config, config.speculative_config
    text, cache = model.hf_text_config, config.cache_config.cache_dtype
    sizes = {model.get_head_size(), getattr(text, "global_head_dim", 0) or 0} - {0}
    sinks = "GptOss" in model.architectures[0]
    backends = {
        get_attn_backend(
            size, model.dtype, cache, has_sink=sinks, use_mm_prefix=model.is_mm_prefix_lm
        ).get_name()
        for size in sizes
    }
    if not speculation.use_eagle():
        return sorted(backends), min(backends), None
    draft = speculation.draft_model_config
    selected = get_attn_backend(draft.get_head_size(), draft.dtype, cache).get_name()
    ours = head_backend(config) if config.use_v2_model_runner else None
    head = selected if ours is None else ours.name
    # FlashInfer's builder of metadata sets it so, but cannot be made without a GPU.
    threshold = max_decode_query_len(config) if head == "FLASHINFER" else None
    return sorted(backends), head, threshold


def _graphs(config: VllmConfig, method: Method | None) -> tuple[GraphCounts, str, int]:
    """How many graphs vLLM's managers would capture, the mode of those of the target, and for how
    many pairs of requests and a captured K they have none of a whole step (on V2)."""
    import torch
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
        SpeculatorCudaGraphManager,
    )

    from drafters.vllm.v2.graphs import Graphs

    k, v2 = config.num_speculative_tokens, config.use_v2_model_runner
    mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.UNIFORM_BATCH, "its backends", k + 1, use_v2_model_runner=v2
    )
    device, full, parts = torch.device("cpu"), CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    if not v2:
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, k + 1)
        keys = dispatcher.cudagraph_keys
        return GraphCounts(len(keys[full]), len(keys[parts]), len(keys[parts])), mode.name, 0

    def captured(manager: CudaGraphManager, of: CUDAGraphMode) -> int:
        return len(manager._capture_descs.get(of, ()))

    table = config.speculative_config.num_speculative_tokens_per_batch_size or ()
    target = ModelCudaGraphManager(config, device, mode, k + 1)
    target._graphs_captured = True  # so that it finds them
    if method == "p-eagle":
        owner = type("Speculator", (), {})()
        Graphs(config, device, k, owner)
        head = sum(captured(manager, full) for manager in vars(owner).values())
    elif method is None:
        head = 0
    else:
        first = SpeculatorCudaGraphManager(config, device, mode, k + 1)
        rest = SpeculatorCudaGraphManager(config, device, CUDAGraphMode.FULL_DECODE_ONLY, 1)
        loops = {entry[2] for entry in table} - {0, 1}  # a graph has all passes for a K
        head = captured(first, full) + captured(first, parts)
        head += captured(rest, full) * max(1, len(loops))
    sequences = config.scheduler_config.max_num_seqs
    steps = [(n, 1 + entry[2]) for entry in table for n in range(1, 1 + sequences)]
    modes = [target.dispatch(n, n * width, width, 0).cg_mode for n, width in steps]
    counts = GraphCounts(captured(target, full), captured(target, parts), head)
    return counts, mode.name, len(modes) - modes.count(full)


@reports_errors("aerie bench")
def main(arguments: Sequence[str]) -> int:
    """Print a table of presets and GPUs; returns the exit code."""
    parser = command_parser("gpu-config", __doc__)
    parser.add_argument("presets", nargs="*", help="names [all]")
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=["H100", "H200", "B200"],
                        help="kinds of GPU [H100 H200 B200]")  # fmt: skip
    parser.add_argument("--flashinfer", action="store_true",
                        help="as with an nvcc, or with FlashInfer's compiled kernels")  # fmt: skip
    options = parser.parse_args(arguments)
    names = options.presets or preset_names()
    cases = [Case(n, g, flashinfer=options.flashinfer) for n in names for g in options.gpus]
    print("\n".join(columns(rows(outcomes(cases)))))
    return 0


def rows(found: Sequence[Configuration]) -> list[list[str]]:
    """Rows of the table, its head first."""
    head = ["preset", "GPUs", "runner", "attention", "tokens a step", "sequences", "graphs: steps",
            "parts", "head", "seconds to capture", "their GiB", "GiB in all"]  # fmt: skip
    lines = [
        [
            each.preset, f"{each.gpus} {each.gpu}", each.runner,
            ", ".join(dict.fromkeys([*each.backends, each.head_backend])),
            f"{each.tokens:,}", f"{each.sequences:,}", *map(str, each.counts),
            f"{each.seconds:.0f}", f"{each.graphs_gib:.1f}",
            "-" if each.memory_gib is None else f"{each.memory_gib:.1f}",
        ]
        for each in found
    ]  # fmt: skip
    return [head, *lines]
