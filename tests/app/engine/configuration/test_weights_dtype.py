"""The data type of weights on a CPU follows measured products."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.engine.configuration import weights_dtype as module
from app.engine.configuration.weights_dtype import (
    ROWS,
    Race,
    lasting_weights_dtype,
    measure,
    weights_dtype,
)

PLENTY = 2**40
CONFIG = {"dtype": "bfloat16"}


def checkpoint(folder: Path, config: dict[str, Any], weights: int = 1000) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return {"model": str(folder), "dtype": "auto"}


def racing(first_row: float, further_row: float) -> Race:
    """float32 takes a second and half a second a further row; the narrow type what is given."""

    def race(rows: Sequence[int], narrow: str) -> Sequence[tuple[float, float]]:
        return [(first_row + further_row * (n - 1), 1.0 + 0.5 * (n - 1)) for n in rows]

    return race


FAST, ONE_ROW_ONLY = racing(0.5, 0.1), racing(0.5, 2.0)


def always(narrow: str) -> bool:
    return True


def never(rows: Sequence[int], narrow: str) -> Sequence[tuple[float, float]]:
    raise AssertionError("nothing was to be measured")


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_the_type_that_multiplies_several_rows_faster_is_taken(tmp_path: Path, stored: str) -> None:
    options = checkpoint(tmp_path, {"torch_dtype": stored})
    narrow = "bfloat16" if stored == "float32" else stored
    assert weights_dtype(options, PLENTY, FAST, always) == narrow
    assert weights_dtype(options, PLENTY, ONE_ROW_ONLY, always) == "float32"


def test_products_that_waited_for_a_core_do_not_decide(tmp_path: Path) -> None:
    """Measured beside five busy processes, microseconds: of one row and of twelve all waited."""

    def busy(rows: Sequence[int], narrow: str) -> Sequence[tuple[float, float]]:
        fast, full = (15093, 194, 203, 195, 254, 6965), (12038, 372, 374, 423, 451, 3130)
        return list(zip(fast, full, strict=True))

    assert weights_dtype(checkpoint(tmp_path, CONFIG), PLENTY, busy, always) == "bfloat16"


@pytest.mark.parametrize(
    ("features", "narrow", "computes"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_f": True}, "bfloat16", False),
        ({"architecture": "x86_64", "avx512_bf16": True}, "bfloat16", True),
        ({"architecture": "x86_64", "avx512_bf16": True}, "float16", False),
        ({"architecture": "x86_64", "amx_bf16": True}, "bfloat16", True),
        ({"architecture": "arm64"}, "bfloat16", True),
    ],
)
def test_a_type_that_the_processor_lacks_is_not_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    features: dict[str, Any],
    narrow: str,
    computes: bool,
) -> None:
    """Gateways that started at once on cores with AVX2 alone had found bfloat16 faster."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: features)
    options = checkpoint(tmp_path, {"dtype": narrow})
    assert weights_dtype(options, PLENTY, FAST if computes else never) == (
        narrow if computes else "float32"
    )


def test_a_multimodal_configuration_nests_it(tmp_path: Path) -> None:
    options = checkpoint(tmp_path, {"text_config": CONFIG})
    assert weights_dtype(options, PLENTY, ONE_ROW_ONLY) == "float32"
    options = checkpoint(tmp_path, {"text_config": None, **CONFIG})
    assert weights_dtype(options, PLENTY, ONE_ROW_ONLY) == "float32"


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"quantization": "awq"}, {"model": "somebody/not-on-this-machine"}],
)
def test_a_choice_of_the_operator_and_the_unknown_are_left_alone(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert weights_dtype(checkpoint(tmp_path, CONFIG) | change, PLENTY, never) is None


def test_quantised_and_unreadable_checkpoints_are_left_alone(tmp_path: Path) -> None:
    quantised = CONFIG | {"quantization_config": {"quant_method": "gptq"}}
    assert weights_dtype(checkpoint(tmp_path, quantised), PLENTY, never) is None
    assert weights_dtype(checkpoint(tmp_path, {"dtype": "int8"}), PLENTY, never) is None
    options = checkpoint(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text("{")
    assert weights_dtype(options, PLENTY, never) is None


def test_float32_must_leave_half_of_the_memory(tmp_path: Path) -> None:
    options = checkpoint(tmp_path, CONFIG, weights=1000)  # 2,000 bytes in float32
    assert weights_dtype(options, 4000, ONE_ROW_ONLY) == "float32"
    assert weights_dtype(options, 3999, never) is None


def test_products_of_this_machine_are_timed() -> None:
    vllm_platforms = pytest.importorskip("vllm.platforms", reason="vllm is not installed")
    if not vllm_platforms.current_platform.is_cpu():
        pytest.skip("layers are prepared in vLLM's CPU build only")
    times = measure(ROWS, "bfloat16")
    assert len(times) == len(ROWS)
    assert all(0 < seconds < 1 for pair in times for seconds in pair)


@pytest.fixture
def no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has chosen nothing yet."""
    monkeypatch.setattr(module, "_choices", {})


@pytest.mark.usefixtures("no_choices")
@pytest.mark.parametrize(("first", "later"), [(PLENTY, 0), (0, PLENTY)])
def test_an_engine_that_starts_again_keeps_its_type(tmp_path: Path, first: int, later: int) -> None:
    """Neither other free memory nor a race beside other load changes it; calibrations hold."""
    options = checkpoint(tmp_path, CONFIG)
    chosen = weights_dtype(options, first, ONE_ROW_ONLY)
    assert lasting_weights_dtype(options, first, ONE_ROW_ONLY) == chosen
    assert lasting_weights_dtype(options, later, ONE_ROW_ONLY) == chosen
    assert lasting_weights_dtype(options, first, FAST) == chosen


@pytest.mark.usefixtures("no_choices")
def test_other_options_are_another_choice(tmp_path: Path) -> None:
    options = checkpoint(tmp_path, CONFIG)
    assert lasting_weights_dtype(options, PLENTY, ONE_ROW_ONLY) == "float32"
    assert lasting_weights_dtype(options | {"dtype": "bfloat16"}, PLENTY, never) is None
    assert lasting_weights_dtype(options | {"quantization": "awq"}, PLENTY, never) is None


def test_products_are_timed_on_the_models_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    races: list[int] = []

    def race(rows: Sequence[int], **options: object) -> list[tuple[float, float]]:
        races.append(torch.get_num_threads())
        return [(float(len(races)), 1.0) for _ in rows]

    stub = ModuleType("drafters.vllm.cpu_matmul")
    stub.race = race  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    before = torch.get_num_threads()
    assert len(measure(ROWS, "bfloat16", threads=before + 1)) == len(ROWS)
    assert (races, torch.get_num_threads()) == ([before + 1], before)
