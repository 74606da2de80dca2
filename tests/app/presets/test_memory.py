"""The memory sum: against figures worked out by hand, and what is said when it does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.doctor.machine import check_gpu_memory
from app.presets.about import (
    About,
    HeadFacts,
    KvLayers,
    TargetFacts,
    about_preset,
    facts_for,
    facts_in,
)
from app.presets.memory import (
    GIB,
    KV_BYTES,
    OF_EXPERTS,
    OVERHEAD_GIB,
    QUANTISED,
    capacity,
    fewest_gpus,
    graphs,
    longest,
    need,
    usable,
)
from app.settings import Settings, load, of_preset, preset_names

TARGET = TargetFacts(
    parameters_b=10,
    hidden_size=1024,
    max_length=65536,
    kv=(
        KvLayers(layers=10, heads=4, head_dim=128),
        KvLayers(layers=30, heads=4, head_dim=128, window=1000),
    ),
)
ABOUT = About(target=TARGET, head=HeadFacts(parameters_b=1, layers=2))

DENSE = {
    "num_hidden_layers": 40, "num_attention_heads": 8, "hidden_size": 1024,
    "max_position_embeddings": 65536, "dtype": "bfloat16",
}  # fmt: skip


def settings(**values: Any) -> Settings:
    given = {"model": "a/b", "drafter": "c/d", "max_model_len": 10_000, "max_num_seqs": 10}
    return load({**given, "max_num_batched_tokens": 500, **values}, {})


def test_the_sum() -> None:
    needed = need(settings(), ABOUT)
    assert needed is not None
    width = 2 * 4 * 128 * 2  # keys and values, heads, their size, bytes
    assert needed.weights * GIB == pytest.approx(20e9)
    assert needed.head * GIB == pytest.approx(2e9)
    # Full layers and the head's keep all; sliding ones their window and what two steps add.
    assert needed.kv * GIB == pytest.approx(width * (12 * 10_000 + 30 * 2_000))
    assert needed.token_bytes == 12 * width
    assert needed.store * GIB == pytest.approx(10 * 16 * 3 * 1024 * 2)  # of 16 steps
    assert needed.total == pytest.approx(
        needed.weights + needed.head + needed.kv + needed.store + needed.graphs + OVERHEAD_GIB
    )
    assert f"{needed.total:.1f} GiB" in needed.sum()


def test_settings_change_it() -> None:
    base = need(settings(), ABOUT)
    plain = need(settings(k=0, drafter=None), ABOUT)
    fp8 = need(
        settings(quantization="fp8_per_tensor", engine_args='{"kv_cache_dtype": "fp8"}'), ABOUT
    )
    double = need(settings(dtype="float32"), ABOUT)
    two = need(settings(tensor_parallel_size=2), ABOUT)
    eight = need(settings(tensor_parallel_size=8), ABOUT)
    assert base and plain and fp8 and double and two and eight
    assert (plain.head, plain.store, plain.graphs) == (0, 0, 0)
    assert plain.kv < base.kv
    assert fp8.weights == base.weights / 2 and fp8.kv == base.kv / 2
    width = 2 * 4 * 128 * 2
    assert plain.kv * GIB == pytest.approx(width * (10 * 10_000 + 30 * 2_000))
    assert double.weights == base.weights * 2 and double.kv == base.kv * 2
    assert two.weights == base.weights / 2 and two.kv == base.kv / 2
    assert eight.kv == base.kv / 4  # four heads: beyond that each GPU has one whole head
    assert need(settings(), About()) is None


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"max_model_len": 20_000}, {"max_model_len": 20_000}),
        ({"quantization": "mxfp8"}, {"quantization": "mxfp8"}),
        ({"dtype": "float32"}, {"dtype": "float32"}),
        ({"kv_cache_gib": 3}, {"kv_cache_memory_bytes": 3 * GIB}),
        ({"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
    ],
)
def test_sizes_count_wherever_they_are_given(
    values: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """The fault: those in `--engine-args` were not read."""
    ours, theirs = settings(**values), settings(engine_args=json.dumps(arguments))
    assert need(ours, ABOUT) == need(theirs, ABOUT)
    assert usable(ours, 80) == usable(theirs, 80)
    assert (need(ours, ABOUT), usable(ours, 80)) != (
        need(settings(), ABOUT),
        usable(settings(), 80),
    )


def test_every_type_of_vllm_s_kv_cache_and_every_quantisation_has_its_bytes() -> None:
    """The fault: an unknown one counted two bytes, and a start that fits was refused."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from typing import get_args

    from vllm.config.cache import CacheDType
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert set(get_args(CacheDType)) <= set(KV_BYTES)
    online = set(ONLINE_QUANT_SHORTHAND_NAMES) - {"online"}
    assert set(QUANTISED) == online | {"experts_int8"}
    base = need(settings(), ABOUT)
    four_bits = settings(
        quantization="mxfp4", engine_args='{"kv_cache_dtype": "int4_per_token_head"}'
    )
    small = need(four_bits, ABOUT)
    assert base and small
    assert small.weights < 0.3 * base.weights and small.kv < 0.3 * base.kv


def test_a_quantisation_of_experts_alone_leaves_a_dense_target_as_it_is() -> None:
    """The fault: a dense target counted half, and its start failed once the weights were loaded."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    assert {name for name, args in _ONLINE_SHORTHANDS.items() if args.linear is None} < OF_EXPERTS
    dense, base = facts_in(DENSE, 20_000_000_000), need(settings(), ABOUT)
    mixture = facts_in({**DENSE, "num_experts": 128}, 20_000_000_000)
    assert base is not None
    for name in OF_EXPERTS:
        quantised = settings(quantization=name)
        whole, small = (need(quantised, About(target=facts)) for facts in (dense, mixture))
        assert whole and small
        assert whole.weights == base.weights
        assert small.weights == pytest.approx(base.weights * QUANTISED[name] / 2)


def test_one_latent_vector_stands_for_the_keys_and_values_of_all_heads() -> None:
    """The fault: GLM-4.7-Flash on one H200 was refused at its second start. With MLA vLLM keeps one
    vector of a token in each layer, whole on every GPU."""
    glm = {
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
        "head_dim": 64, "hidden_size": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "max_position_embeddings": 202752, "dtype": "bfloat16",
    }  # fmt: skip
    about = About(target=facts_in(glm, 62_500_000_000))
    for gpus in (1, 2):
        serves = load({"model": "a/b", "tensor_parallel_size": gpus}, {})
        needed = need(serves, about)
        assert needed is not None and needed.token_bytes == 47 * 576 * 2
        finding = check_gpu_memory(serves, about, [140.4] * gpus)
        assert finding is not None and finding.status == "ok"


def test_a_pair_that_is_named_has_the_facts_of_its_own_preset() -> None:
    """The fault: the first preset of a target stood for all of its heads, also where a file of
    settings named another one."""
    for name in preset_names():
        assert facts_for(of_preset(name)) == about_preset(name)
    qwen = of_preset("qwen3-8b").model.model
    other = load({"model": qwen, "drafter": "some/head"}, {})
    assert facts_for(other) == about_preset("qwen3-8b")


def test_graphs_and_steps_are_those_of_the_engine() -> None:
    """The same functions make the engine's options."""
    wanted = settings(max_num_seqs=128, max_num_batched_tokens=None, k=7)
    needed, captured = need(wanted, ABOUT), graphs(wanted, ABOUT)
    assert needed and captured and needed.graphs == captured.gib > 0.5
    assert capacity(wanted, ABOUT).tokens == 8192 + 128 * 13
    assert capacity(wanted, ABOUT, 179.0).tokens == 16384 + 128 * 13
    eager = settings(max_num_seqs=128, enforce_eager=True)
    assert graphs(eager, ABOUT).counts == (0, 0, 0)  # type: ignore[union-attr]


def test_a_head_that_reads_more_of_the_target_keeps_more() -> None:
    five = ABOUT.model_copy(update={"head": HeadFacts(parameters_b=1, layers=2, taps=5)})
    needed, base = need(settings(), five), need(settings(), ABOUT)
    assert needed and base and needed.store == pytest.approx(base.store * 5 / 3)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_as_stored_beat_the_count(quantization: str | None) -> None:
    """`fp8` is vLLM's name for such a checkpoint; its size is not halved once more."""
    stored = ABOUT.model_copy(update={"target": TARGET.model_copy(update={"weights_gib": 9.0})})
    needed = need(settings(quantization=quantization), stored)
    assert needed is not None and needed.weights == 9


def test_a_pair_that_fits_says_so() -> None:
    finding = check_gpu_memory(settings(), ABOUT, [80.0])
    assert finding is not None and finding.status == "ok"
    assert "73.6 usable on a GPU of 80.0" in finding.detail


@pytest.mark.parametrize(
    ("gpus", "values", "status", "remedy"),
    [
        ([24.0], {}, "warn", "2 such GPUs"),
        ([24.0, 24.0], {}, "warn", "--tensor-parallel-size 2"),
        ([20.0], {}, "FAIL", "2 such GPUs"),  # the weights are 18.6 GiB
        ([2.0], {}, "FAIL", "larger GPUs"),
        ([80.0], {"tensor_parallel_size": 2}, "FAIL", "--tensor-parallel-size"),
        (
            [28.0],
            {"max_model_len": 65536, "max_num_batched_tokens": 8192},
            "warn",
            "--max-model-len",
        ),
        ([80.0], {"gpu_memory_utilization": 0.2}, "FAIL", "--gpu-memory-utilization 0.92"),
    ],
)
def test_a_pair_that_does_not_fit_says_what_would(
    gpus: list[float], values: dict[str, Any], status: str, remedy: str
) -> None:
    """Only weights that do not fit end a start: the rest of the sum has allowances."""
    finding = check_gpu_memory(settings(**values), ABOUT, gpus)
    assert finding is not None and finding.status == status
    assert finding.remedy is not None and remedy in finding.remedy


def test_among_unequal_gpus_those_count_that_an_engine_takes() -> None:
    two = settings(tensor_parallel_size=2)
    for gpus, certain, status in [
        ([80.0, 80.0, 2.0], True, "ok"),
        ([80.0, 80.0, 2.0], False, "warn"),
        ([80.0, 2.0, 80.0], True, "FAIL"),
        ([80.0, 2.0, 2.0], False, "FAIL"),  # two of the size that it needs are not there
        ([80.0, 60.0], False, "ok"),
    ]:
        finding = check_gpu_memory(two, ABOUT, gpus, certain=certain)
        assert finding is not None and finding.status == status, gpus


def test_beside_a_given_kv_cache_the_share_bounds_nothing() -> None:
    """The fault: a small share, with which the engine starts, was said to leave no memory."""
    given = settings(kv_cache_gib=1, gpu_memory_utilization=0.05)
    assert usable(given, 80) == usable(settings(), 80)


def test_the_length_that_is_proposed_fits_and_more_does_not() -> None:
    wanted = settings(max_model_len=65536)
    proposed = longest(wanted, ABOUT, 27.0)
    assert 0 < proposed < 65536
    for length, fits in ((proposed, True), (proposed + 1024, False)):
        needed = need(settings(max_model_len=length), ABOUT)
        assert needed is not None and (needed.total <= 27 * 0.92) is fits


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert check_gpu_memory(settings(), None, [80.0]) is None
    assert check_gpu_memory(settings(), About(), [80.0]) is None
    assert check_gpu_memory(settings(), ABOUT, []) is None
    assert fewest_gpus(of_preset("embedded"), About(), 80) == 1
