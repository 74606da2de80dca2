"""Engine options: what vLLM is asked for."""

from __future__ import annotations

from importlib import import_module

import pytest

from app.engine.configuration.cpu import CpuMachine
from app.engine.configuration.options import (
    ONE_PROCESS,
    REQUEST_BOUNDS,
    SHARE_BESIDE_KV_SIZE,
    engine_options,
    set_environment,
)
from app.settings import load
from drafters.config import LOOKUP_DRAFTER, DrafterConfig, captured_ks
from drafters.model.config import Method


@pytest.mark.parametrize(("method", "is_parallel"), [("p-eagle", True), ("eagle3", False)])
def test_both_kinds_of_head_are_asked_for_as_eagle3(method: Method, is_parallel: bool) -> None:
    options = engine_options(load({"k": "3"}, {}), method=method)
    speculation = options["speculative_config"]
    assert speculation["method"] == "eagle3"
    assert speculation["parallel_drafting"] is is_parallel
    assert speculation["disable_eagle_block_drop"] is True, "it would cost a cached prefix a block"
    assert options["scheduler_cls"].endswith(".DraftingScheduler")
    assert options["async_scheduling"] is False


def test_our_drafter_is_told_in_the_engines_own_configuration() -> None:
    options = engine_options(load({"catch_up_tokens": "99", "draft_context": "500"}, {}))
    ours = options["additional_config"]["aerie"]
    assert (ours["catch_up_tokens"], ours["context_tokens"]) == (99, 500)


@pytest.mark.parametrize(("k", "lookup_k", "most"), [(3, 10, 10), (7, 4, 7), (3, 0, 3)])
def test_the_engine_has_room_for_the_drafts_of_every_source(
    k: int, lookup_k: int, most: int
) -> None:
    options = engine_options(load({"k": str(k), "lookup_k": str(lookup_k)}, {}))
    assert options["speculative_config"]["num_speculative_tokens"] == most
    config = DrafterConfig.read(options["additional_config"])
    assert (config.head_k(most), config.lookup_k(most)) == (k, lookup_k)


def test_nothing_is_looked_up_on_the_v2_runner() -> None:
    options = engine_options(load({"k": "3"}, {}), v2=True)
    assert options["speculative_config"]["num_speculative_tokens"] == 3
    assert DrafterConfig.read(options["additional_config"]).lookup_k(3) == 0


def test_without_a_head_our_drafter_looks_up_on_the_v1_runner() -> None:
    options = engine_options(load({"model": "org/model", "lookup_k": "8"}, {}))
    assert options["speculative_config"] == {
        "method": "custom_class", "model": LOOKUP_DRAFTER, "num_speculative_tokens": 8,
    }  # fmt: skip
    config = DrafterConfig.read(options["additional_config"])
    assert (config.head_k(8), config.lookup_k(8)) == (0, 8)
    module, _, name = LOOKUP_DRAFTER.rpartition(".")
    pytest.importorskip("vllm", reason="vllm is not installed")
    assert callable(getattr(import_module(module), name).propose)


def test_without_a_head_vllm_looks_up_on_the_v2_runner() -> None:
    options = engine_options(load({"model": "org/model", "lookup_k": "8"}, {}), v2=True)
    speculation = options["speculative_config"]
    assert speculation["method"] == "ngram_gpu"
    assert speculation["prompt_lookup_min"] <= speculation["prompt_lookup_max"]
    table = speculation["num_speculative_tokens_per_batch_size"]
    assert [k for _, _, k in table] == list(captured_ks(8))
    config = DrafterConfig.read(options["additional_config"])
    assert (config.head_k(8), config.lookup_k(8)) == (8, 0), "its K is chosen as a head's"


def test_on_the_v2_runner_steps_overlap_and_each_k_has_its_graphs() -> None:
    options = engine_options(load({"k": "3"}, {}), v2=True)
    assert options["scheduler_cls"].endswith(".AsyncDraftingScheduler")
    assert options["async_scheduling"] is True
    table = options["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert sorted(k for _, _, k in table) == [0, 1, 2, 3]
    plain = engine_options(load({"k": "3"}, {}))["speculative_config"]
    assert "num_speculative_tokens_per_batch_size" not in plain


def test_drafts_are_counted_for_each_request_only_if_somebody_is_told() -> None:
    name = "per_request_spec_decode_metrics"
    assert engine_options(load({}, {}))[name] == "summary"
    assert name not in engine_options(load({"speculation_header": "false"}, {}))
    assert name not in engine_options(load({"k": "0"}, {}))  # vLLM would not start


def test_k_zero_asks_for_no_drafter_at_all() -> None:
    for model in ({}, {"model": "org/model"}):  # with a head, and without one
        options = engine_options(load({**model, "k": "0"}, {}))
        assert not {"speculative_config", "additional_config", "scheduler_cls"} & set(options)


def test_sizes_left_open_are_left_to_vllm() -> None:
    options = engine_options(load({"model": "a/b", "k": "0"}, {}))
    assert not {"max_num_seqs", "kv_cache_memory_bytes", "max_model_len"} & set(options)


def test_on_a_cpu_the_kv_cache_takes_a_share_of_what_is_free() -> None:
    machine = CpuMachine(free_memory=8 * 2**30, can_compile=True)
    plain = load({"model": "a/b", "k": "0"}, {})
    assert engine_options(plain, machine)["kv_cache_memory_bytes"] == 2 * 2**30
    given = load({"kv_cache_gib": "0.5"}, {})
    for there in (machine, None):
        assert engine_options(given, there)["kv_cache_memory_bytes"] == 2**29


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"kv_cache_gib": "1"}, SHARE_BESIDE_KV_SIZE),
        ({"kv_cache_gib": "1", "tensor_parallel_size": "2"}, SHARE_BESIDE_KV_SIZE),
        ({"engine_args": '{"kv_cache_memory_bytes": 1073741824}'}, SHARE_BESIDE_KV_SIZE),
        ({"kv_cache_gib": "1", "gpu_memory_utilization": "0.5"}, 0.5),
        ({"kv_cache_gib": "1", "engine_args": '{"gpu_memory_utilization": 0.4}'}, 0.4),
        ({}, None),
        ({"kv_cache_gib": "1", "engine_args": '{"kv_cache_memory_bytes": null}'}, None),
        ({"kv_cache_gib": "1", "engine_args": '{"load_format": "ipc_cache"}'}, None),
    ],
)
def test_with_a_given_kv_cache_little_of_a_gpu_has_to_be_free(
    settings: dict[str, str], share: float | None
) -> None:
    """The fault: the default model did not start on a GPU of which less than 92% was free."""
    given = load({"model": "a/b", "k": "0", **settings}, {})
    assert engine_options(given).get("gpu_memory_utilization") == share
    if share == SHARE_BESIDE_KV_SIZE:
        machine = CpuMachine(2**33, can_compile=True)
        assert "gpu_memory_utilization" not in engine_options(given, machine)


def test_on_a_cpu_the_model_runs_in_the_engines_own_process() -> None:
    machine = CpuMachine(2**33, can_compile=True, threads=2)
    name = "distributed_executor_backend"
    assert engine_options(load({}, {}), machine)[name] == ONE_PROCESS
    bound = CpuMachine(2**33, can_compile=True, threads=None)
    two = load({"tensor_parallel_size": "2"}, {})
    replicas = load({"engine_args": '{"data_parallel_size": 2}'}, {})
    theirs = load({"engine_args": f'{{"{name}": "mp"}}'}, {})
    assert name not in engine_options(load({}, {}))
    assert name not in engine_options(load({}, {}), bound)
    assert name not in engine_options(two, machine)
    assert name not in engine_options(replicas, machine)
    assert engine_options(theirs, machine)[name] == "mp"


def test_without_a_compiler_a_cpu_serves_uncompiled() -> None:
    """A fresh machine has Python and make, but not always g++."""
    settings = load({}, {})
    assert engine_options(settings, CpuMachine(2**33, can_compile=True))["enforce_eager"] is False
    assert engine_options(settings, CpuMachine(2**33, can_compile=False))["enforce_eager"] is True
    assert engine_options(settings)["enforce_eager"] is False


def test_the_operator_has_the_last_word() -> None:
    options = engine_options(load({"engine_args": '{"dtype": "float32", "block_size": 64}'}, {}))
    assert (options["dtype"], options["block_size"]) == ("float32", 64)


def test_spans_of_the_engine_go_where_the_gateways_go() -> None:
    there = "http://127.0.0.1:4317"
    options = engine_options(load({"otlp_traces_endpoint": there}, {}))
    assert options["otlp_traces_endpoint"] == there
    assert "otlp_traces_endpoint" not in engine_options(load({}, {}))


def test_one_backend_constrains_all_output() -> None:
    """vLLM's "auto" checks each request against the backend that fits it, and runs all of them
    with that of the first."""
    name = "structured_outputs_config"
    assert engine_options(load({}, {}))[name]["backend"] == "xgrammar"
    bare = engine_options(load({"model": "a/b", "k": "0"}, {}))
    assert bare[name] == {"backend": "xgrammar"}
    given = '{"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": true}}'
    theirs = engine_options(load({"model": "a/b", "k": "0", "engine_args": given}, {}))
    assert theirs[name] == {"backend": "guidance", "disable_any_whitespace": True}


def test_what_the_operator_set_stays_and_our_plugin_is_loaded() -> None:
    """The fault: beside `VLLM_PLUGINS` of an operator vLLM had none of this project's corrections,
    and no drafter started."""
    environ = {"VLLM_LOGGING_LEVEL": "INFO"}
    set_environment(environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "INFO" and "VLLM_PLUGINS" not in environ
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "each engine, on a GPU too"
    assert environ["VLLM_MAX_STOP_STRINGS"] == REQUEST_BOUNDS["VLLM_MAX_STOP_STRINGS"]
    for given, expected in {
        "": "aerie", "theirs": "theirs,aerie", "aerie,theirs": "aerie,theirs",
    }.items():  # fmt: skip
        environ = {"VLLM_PLUGINS": given}
        set_environment(environ)
        set_environment(environ)
        assert environ["VLLM_PLUGINS"] == expected
