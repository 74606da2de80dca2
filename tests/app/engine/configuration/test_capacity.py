"""The largest step of a GPU server: by its sequences, K and the kind of head."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.configuration.capacity import (
    DRAFTING_SEQUENCES,
    ServerDefaults,
    estimate_graphs,
    graphs_of,
    server_defaults,
    step_shape,
)
from app.engine.configuration.options import engine_options
from app.settings import load
from drafters.graph_sizes import GraphCounts

H100 = ServerDefaults(8192, 1024)


def test_prompts_have_the_room_that_vllm_s_own_server_leaves_them() -> None:
    """With every sequence decoding at the largest K, in the target and in the head's slots."""
    for sequences in (1, 128, 256):
        shape = step_shape({"max_num_seqs": sequences}, H100, 7, "p-eagle")
        assert shape.tokens - sequences * (7 + 1 + 7 - 1) == 8192 - sequences
        shape = step_shape({"max_num_seqs": sequences}, H100, 7, "eagle3")
        assert shape.tokens - sequences * (7 + 1) == 8192 - sequences


def test_lookups_that_are_longer_than_the_heads_drafts_have_room_and_graphs() -> None:
    """On the V1 runner, at K = 5 beside lookups of 10. Catches: their room taken from prompts, and
    no graph for the largest batches."""
    shape = step_shape({"max_num_seqs": 256}, H100, 5, "p-eagle", lookup_k=10)
    assert shape.tokens - 256 * (10 + 1 + 5 - 1) == 8192 - 256
    assert shape.sizes[-1] == 256 * (10 + 1)
    assert step_shape({}, H100, 5, "p-eagle", lookup_k=3) == step_shape({}, H100, 5, "p-eagle")


def test_without_drafts_all_is_as_vllm_has_it() -> None:
    assert step_shape({}, H100, 0, "p-eagle") == (1024, 8192, [])
    assert step_shape({}, H100, 0, None, lookup_k=10) == (1024, 8192, [])


def test_sequences_that_nobody_named_are_bounded_by_their_rows_of_logits() -> None:
    assert step_shape({}, H100, 7, "p-eagle").sequences == DRAFTING_SEQUENCES
    assert step_shape({}, ServerDefaults(2048, 100), 7, "p-eagle").sequences == 100
    assert step_shape({"max_num_seqs": 1024}, H100, 7, "p-eagle").sequences == 1024


def test_throughput_mode_doubles_as_in_vllm() -> None:
    shape = step_shape({"performance_mode": "throughput"}, H100, 7, "eagle3")
    assert shape[:2] == (2 * DRAFTING_SEQUENCES, 2 * 8192 + 2 * DRAFTING_SEQUENCES * 7)


@pytest.mark.parametrize(
    "given",
    [
        {"cudagraph_capture_sizes": [8]},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"compilation_config": {"max_cudagraph_capture_size": 8}},
        {"enforce_eager": True},
        {"performance_mode": "interactivity"},
    ],
)
def test_an_operator_decides_on_graphs(given: dict[str, Any]) -> None:
    assert step_shape(given, H100, 7, "p-eagle").sizes == []
    other = {"compilation_config": {"cudagraph_mode": "FULL"}, "enforce_eager": False}
    assert step_shape(other, H100, 7, "p-eagle").sizes


def test_options_of_a_gpu_server_and_of_a_cpu() -> None:
    settings = load({"model": "a/b", "drafter": "c/d", "k": 7, "max_num_seqs": 128}, {})
    for v2, drafts in ((True, 7), (False, 10)):  # on V1 lookups may have 10
        options = engine_options(settings, gpu=H100, v2=v2)
        assert options["max_num_batched_tokens"] == 8192 + 128 * (drafts + 7 - 1)
        assert options["cudagraph_capture_sizes"][-1] == 128 * (drafts + 1)
    on_cpu = engine_options(settings)
    assert not {"max_num_batched_tokens", "cudagraph_capture_sizes"} & set(on_cpu)
    given = '{"max_num_batched_tokens": 4096, "cudagraph_capture_sizes": [8, 16]}'
    theirs = engine_options(
        load({"model": "a/b", "drafter": "c/d", "engine_args": given}, {}), gpu=H100
    )
    assert theirs["max_num_batched_tokens"] == 4096
    assert theirs["cudagraph_capture_sizes"] == [8, 16]
    plain = engine_options(load({"model": "a/b", "k": 0}, {}), gpu=H100)
    assert not {"max_num_batched_tokens", "max_num_seqs"} & set(plain)


def test_prompts_that_are_read_whole_have_room() -> None:
    """The fault: vLLM's own room for them gave way to ours, and a server did not start."""
    given = {"model": "a/b", "drafter": "c/d", "engine_args": '{"enable_chunked_prefill": false}'}
    options = engine_options(load({**given, "max_model_len": 32768}, {}), gpu=H100)
    assert options["max_num_batched_tokens"] >= 32768
    options = engine_options(load(given, {}), gpu=H100)
    assert "max_num_batched_tokens" not in options, "vLLM knows the model's length"
    theirs = engine_options(load({**given, "max_num_batched_tokens": 65536}, {}), gpu=H100)
    assert theirs["max_num_batched_tokens"] == 65536


def test_the_estimate_counts_every_graph_and_says_so() -> None:
    counts = GraphCounts(full=100, parts=20, head=50)
    estimate = estimate_graphs(counts, 7, "p-eagle", layers=40, head_layers=4)
    assert estimate.seconds == pytest.approx(100 * 0.064 + 20 * 0.12 + 2 * 50 * 0.0064)
    assert estimate.gib == pytest.approx((120 * 40 + 50 * 4) * 0.25 / 1024)
    assert "100 of the target's decode steps" in str(estimate)
    # A graph of an EAGLE-3 head has all passes but the first.
    longer = estimate_graphs(counts, 7, "eagle3", layers=40, head_layers=1)
    assert longer.seconds - estimate.seconds == pytest.approx(2 * 50 * 2 * 0.0016)
    shape = step_shape({"max_num_seqs": 128}, H100, 7, "p-eagle")
    assert sum(graphs_of(shape, 7, "p-eagle")) < 300


def test_defaults_by_memory() -> None:
    assert server_defaults(179) == (16384, 1024)
    assert server_defaults(80) == H100
    assert server_defaults(80, "NVIDIA A100-SXM4-80GB") == server_defaults(45) == (2048, 256)
