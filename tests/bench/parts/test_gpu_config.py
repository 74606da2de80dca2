"""vLLM's configuration as on GPUs that are not here, for every preset. Nothing of it is
mocked: only the platform's answers about the GPU are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")
pytest.importorskip("triton", reason="the V2 runner needs Triton, and this platform has none")

from app.engine.configuration.capacity import ServerDefaults, graphs_of, server_defaults
from app.presets.about import About, about_preset
from app.presets.memory import UTILISATION, capacity
from app.settings import Settings, of_preset, preset_names
from bench.parts.gpu_config import Case, Configuration, rows
from bench.parts.gpu_platform import GPUS
from drafters.config import captured_ks
from drafters.graph_sizes import GraphCounts
from drafters.model.config import Method

REPOSITORY = Path(__file__).parents[3]
PRESETS = preset_names()
# An H200 differs from an H100 in its memory alone.
ON_H200 = ("gpt-oss-20b", "gpt-oss-120b", "llama-3.3-70b", "gemma-4-31b", "qwen3-8b")
PAIRS = [
    *((name, gpu) for name in PRESETS for gpu in ("H100", "B200")),
    *((name, "H200") for name in ON_H200),
]
# FlashInfer attends in the same way at every length of the context.
WITH_FLASHINFER = [name for name in PRESETS if not name.endswith("-long-context")]
THEIRS = {
    "max_num_seqs": 16, "max_num_batched_tokens": 4096, "cudagraph_capture_sizes": [8, 64],
}  # fmt: skip
WHOLE_PROMPTS = {"enable_chunked_prefill": False}
WITHOUT_HEAD = ("embedded", "qwen3-8b", "gpt-oss-120b")
CASES = [
    *(Case(name, gpu) for name, gpu in PAIRS),
    *(Case(name, "B200", flashinfer=True) for name in WITH_FLASHINFER),
    Case("gpt-oss-20b", "A100"),
    Case("gpt-oss-20b", "L40S"),
    Case("qwen3-8b", "H100", data_parallel=8),
    Case("qwen3-8b-eagle3", "H100", data_parallel=8),
    Case("gpt-oss-120b", "H100", given={"tensor_parallel_size": 8}),
    Case("gpt-oss-20b", "H100", given=THEIRS),
    Case("gpt-oss-20b", "H100", given={"enforce_eager": True}),
    Case("qwen3-8b", "H100", given=WHOLE_PROMPTS),
    *(Case(name, "H100", head=False) for name in WITHOUT_HEAD),
]
SCRIPT = """
import json, sys
from bench.parts.gpu_config import Case, outcomes
print("\\n" + json.dumps(outcomes([Case(*case) for case in json.load(sys.stdin)])))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, Configuration]:
    """The configuration of each case, by the case's JSON."""
    cases = [json.dumps(case) for case in CASES]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=f"[{','.join(cases)}]", text=True, cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = [
        Configuration(**(dict(zip(Configuration._fields, row, strict=True))))
        for row in json.loads(run.stdout.splitlines()[-1])
    ]
    return dict(zip(cases, found, strict=True))


def outcome(built: dict[str, Configuration], case: Case) -> Configuration:
    return built[json.dumps(case)]


def drafting(settings: Settings, about: About) -> tuple[int, Method | None]:
    """The most draft tokens of a request, and how the head drafts; None without one."""
    if not settings.has_head:
        return settings.speculation.lookup_k, None
    return settings.speculation.k, about.head.method if about.head else "p-eagle"


@pytest.mark.parametrize("preset", WITHOUT_HEAD)
def test_without_a_head_vllm_looks_up_on_the_device(
    preset: str, built: dict[str, Configuration]
) -> None:
    found, settings = outcome(built, Case(preset, "H100", head=False)), of_preset(preset)
    assert found.runner == "V2" and found.mode == "FULL_AND_PIECEWISE"
    assert found.ks == list(captured_ks(settings.speculation.lookup_k))
    assert found.counts[0] > 0 and found.counts[2] == 0, "the target's graphs alone"
    for each in found.ks:
        assert found.sequences * (each + 1) <= found.sizes[-1]


@pytest.mark.parametrize(("preset", "gpu"), PAIRS)
def test_a_preset_as_on_a_gpu(preset: str, gpu: str, built: dict[str, Configuration]) -> None:
    found = outcome(built, Case(preset, gpu))
    settings, about = of_preset(preset), about_preset(preset)
    k, method = drafting(settings, about)
    if settings.speculation.draft_context:  # which V2 lacks
        assert found.runner == "V1" and not found.ks
        return
    expected = capacity(settings, about, GPUS[gpu].gib)
    assert found.runner == "V2" and found.mode == "FULL_AND_PIECEWISE"
    # What `aerie models` and the sum of memory say is what the engine takes.
    assert (found.sequences, found.tokens, found.sizes) == expected
    assert GraphCounts(*found.counts) == graphs_of(expected, k, method)
    assert found.sequences == (settings.engine.max_num_seqs or 256)
    assert found.tokens > server_defaults(GPUS[gpu].gib).tokens
    assert found.ks == list(captured_ks(k))
    for each in found.ks:
        assert found.sequences * (each + 1) <= found.sizes[-1]
    assert found.without_graph == 0, "every batch decodes in a whole graph at each K"
    if found.memory_gib is not None:
        assert found.memory_gib <= UTILISATION * GPUS[gpu].gib
    assert found.seconds < 30


@pytest.mark.parametrize(("preset", "gpu"), PAIRS)
def test_no_attention_backend_needs_a_cuda_compiler(
    preset: str, gpu: str, built: dict[str, Configuration]
) -> None:
    """Catches: on a B200 vLLM selects FlashInfer, whose kernels an nvcc compiles that neither the
    container image nor a machine with only a driver has."""
    found = outcome(built, Case(preset, gpu))
    if preset == "embedded":  # float32
        assert found.backends == ["TRITON_ATTN"]
        return
    assert {*found.backends, found.head_backend} <= {"FLASH_ATTN", "TRITON_ATTN"}
    assert found.head_threshold is None
    # Heads of 512, which FlashAttention lacks there.
    if gpu == "B200" and preset.startswith("gemma-4"):
        assert "TRITON_ATTN" in found.backends
    if gpu != "B200":
        assert found.backends == [found.head_backend] == ["FLASH_ATTN"]


@pytest.mark.parametrize("preset", WITH_FLASHINFER)
def test_the_attention_backends_of_target_and_head_with_flashinfer(
    preset: str, built: dict[str, Configuration]
) -> None:
    """On a B200 vLLM selects FlashInfer, whose decode takes 1 + K tokens of a request on the V2
    runner. A pass of EAGLE-3 has as many; one of P-EAGLE has 2 K, and runs on another backend."""
    found = outcome(built, Case(preset, "B200", flashinfer=True))
    if preset == "embedded":  # float32
        assert found.backends == ["TRITON_ATTN"]
        return
    assert found.backends == ["FLASHINFER"]
    settings, about = of_preset(preset), about_preset(preset)
    if settings.speculation.draft_context:  # on V1
        return
    if not settings.has_head:
        assert found.head_backend == "FLASHINFER"
    elif about.head and about.head.method == "eagle3":
        assert found.head_backend == "FLASHINFER"
        assert found.head_threshold == 1 + settings.speculation.k
    else:
        assert found.head_backend == "FLASH_ATTN"
        assert found.head_threshold is None


def test_vllm_s_defaults_of_a_server_are_those_of_the_table(
    built: dict[str, Configuration],
) -> None:
    for gpu, facts in GPUS.items():
        found = outcome(built, Case("gpt-oss-20b", gpu))
        assert found.defaults is not None
        assert ServerDefaults(*found.defaults) == server_defaults(facts.gib, facts.name)


@pytest.mark.parametrize("preset", ["qwen3-8b", "qwen3-8b-eagle3"])
def test_replicas_of_a_dense_target_have_graphs_for_every_k(
    preset: str, built: dict[str, Configuration]
) -> None:
    """The fault: with data parallelism vLLM dropped the table, and K changed without graphs."""
    eight, one = (outcome(built, Case(preset, "H100", replicas)) for replicas in (8, 1))
    assert eight.ks == one.ks == [0, 1, 2, 3, 5]
    assert eight.counts == one.counts


def test_eight_gpus_of_one_engine_take_the_same_steps(built: dict[str, Configuration]) -> None:
    eight = outcome(built, Case("gpt-oss-120b", "H100", given={"tensor_parallel_size": 8}))
    one = outcome(built, Case("gpt-oss-120b", "H100"))
    assert (eight.runner, eight.backends, eight.tokens, eight.sizes, eight.counts) == (
        one.runner, one.backends, one.tokens, one.sizes, one.counts,
    )  # fmt: skip


def test_an_operator_s_own_values_win(built: dict[str, Configuration]) -> None:
    found = outcome(built, Case("gpt-oss-20b", "H100", given=THEIRS))
    assert (found.sequences, found.tokens, found.sizes) == (16, 4096, [8, 64])
    eager = outcome(built, Case("gpt-oss-20b", "H100", given={"enforce_eager": True}))
    assert eager.sizes == [] and sum(eager.counts) == 0


def test_a_server_that_reads_prompts_whole_has_room_for_the_longest(
    built: dict[str, Configuration],
) -> None:
    found = outcome(built, Case("qwen3-8b", "H100", given=WHOLE_PROMPTS))
    longest = of_preset("qwen3-8b").engine.max_model_len
    assert longest is not None and found.tokens - longest >= found.sequences * 5
    assert found.without_graph == 0


def test_the_table_has_a_row_for_each(built: dict[str, Configuration]) -> None:
    table: list[list[Any]] = rows(list(built.values()))
    assert len(table) == 1 + len(CASES) and {len(row) for row in table} == {12}
