"""The memory sum: against figures worked out by hand, and what is said when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from app.doctor.machine import check_gpu_memory
from app.presets.about import About, HeadFacts, KvLayers, TargetFacts
from app.presets.memory import GIB, OVERHEAD_GIB, capacity, fewest_gpus, graphs, longest, need
from app.settings import Settings, load, of_preset

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
    ("gpus", "values", "remedy"),
    [
        ([24.0], {}, "2 such GPUs"),
        ([24.0, 24.0], {}, "--tensor-parallel-size 2"),
        ([2.0], {}, "larger GPUs"),
        ([80.0], {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ([28.0], {"max_model_len": 65536, "max_num_batched_tokens": 8192}, "--max-model-len"),
        ([80.0], {"gpu_memory_utilization": 0.2}, "--gpu-memory-utilization 0.92"),
    ],
)
def test_a_pair_that_does_not_fit_says_what_would(
    gpus: list[float], values: dict[str, Any], remedy: str
) -> None:
    finding = check_gpu_memory(settings(**values), ABOUT, gpus)
    assert finding is not None and finding.status == "FAIL"
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
