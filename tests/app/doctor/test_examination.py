"""What doctor and a start say of the models and of memory on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli import _refuse_unfit_models
from app.doctor import examination, machine, machine_facts, pair, report
from app.doctor.examination import check_start, examine
from app.doctor.gpus import GpuDevice
from app.doctor.models import Checkpoint, read_checkpoint
from app.settings import load
from drafters.model.weight_files import StoredTensor

TARGET = Path(__file__).parents[3] / "models" / "embedded" / "target"


def failures(settings: dict[str, Any], preset: str | None = None) -> list[str]:
    """What a start fails for."""
    findings = check_start(load({"k": "0", **settings}, {}, preset=preset), preset)
    return [
        f"{finding.check}: {finding.detail}" for finding in findings if finding.status == "FAIL"
    ]


@pytest.mark.parametrize(
    ("settings", "layers", "left_out"),
    [
        ({}, None, True),
        ({}, ["mamba", "attention"], True),
        ({}, ["attention"] * 2, False),
        ({"lookup_k": "5"}, None, False),
        ({"k": "0"}, None, False),
    ],
)
def test_lookups_that_the_start_leaves_out_are_not_promised(
    settings: dict[str, Any], layers: list[str] | None, left_out: bool, tmp_path: Path
) -> None:
    """The fault: doctor said that drafts are looked up, and the start took the path no-drafts."""
    config = json.loads((TARGET / "config.json").read_text("utf-8"))
    config |= {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(TARGET / "model.safetensors")
    findings = {
        finding.check: finding.detail
        for finding in examine(load({"model": str(tmp_path), "port": "0", **settings}, {}))
    }
    assert ("--lookup-k asks for them" in findings["head"]) is left_out
    assert findings["start path"].startswith("no-drafts") is (left_out or "k" in settings)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs of 79.6 GiB, and vLLM's build for them."""
    devices = [GpuDevice(str(i), f"GPU-{i}", "H100", 79.6, "580.1") for i in range(4)]
    monkeypatch.setattr(machine_facts, "gpu_devices", lambda: devices)
    monkeypatch.setattr(machine_facts, "version_of", lambda _: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("settings", "fails"),
    [
        ({}, True),
        ({"engine_args": {"pipeline_parallel_size": 1, "load_format": "auto"}}, True),
        ({"engine_args": {"pipeline_parallel_size": 4}}, False),
        ({"engine_args": {"cpu_offload_gb": 80}}, False),
        ({"engine_args": {"enable_expert_parallel": True}}, False),
        ({"tensor_parallel_size": "2"}, False),  # vLLM refuses the length, if it does not fit
        ({"engine_args": {"tensor_parallel_size": 2}}, False),
        ({"engine_args": {"quantization_config": {"linear": "mxfp4"}}}, False),
        ({"max_model_len": "auto"}, True),  # the weights alone do not fit
        ({"tensor_parallel_size": "8"}, True),
        (
            {"tensor_parallel_size": "8", "engine_args": {"distributed_executor_backend": "ray"}},
            False,
        ),
    ],
)
def test_the_sum_of_gpu_memory_refuses_only_what_it_counts(
    settings: dict[str, Any], fails: bool
) -> None:
    preset = "llama-3.3-70b"
    found = failures({"k": "5", "max_model_len": "32768", **settings}, preset)
    assert bool(found) is fails, found


@pytest.mark.usefixtures("gpus")
def test_data_parallelism_splits_the_experts_of_a_mixture_alone() -> None:
    """The fault: a mixture that takes all GPUs of a machine by `--data-parallel-size` was refused,
    though vLLM splits its experts over them."""
    spread = {"gpu_memory_utilization": "0.5", "engine_args": {"data_parallel_size": 4}}
    mixture = {**spread, "max_model_len": "32768"}
    assert failures({**mixture, "engine_args": {}}, "gpt-oss-120b")
    assert failures(mixture, "gpt-oss-120b") == []
    assert failures({"model": "meta-llama/Llama-3.3-70B-Instruct", **spread})


@pytest.mark.usefixtures("gpus")
def test_the_sum_of_gpu_memory_has_the_head_that_is_served() -> None:
    """The fault: a head beside a target without a preset counted nothing, and another preset's head
    stood for each head of its target."""
    weights = {"weight": StoredTensor("I8", (1024, 1024, 1024), Path(), 0, 1024**3)}
    config = json.loads((TARGET.parent / "eagle3" / "config.json").read_text("utf-8"))
    head = Checkpoint("head", config, weights, weights_bytes=1024**3)
    for found, counted in (
        (head, "head 2.0 "),  # stored in 8 bits, loaded in 16
        (replace(head, config={**config, "quantization_config": {"bits": 8}}), "head 1.0 "),
    ):
        checkpoints = {"model": read_checkpoint(TARGET), "head": found}
        (finding,) = examination._check_memory(
            load({"model": "a/b", "drafter": "head"}, {}),
            pair.facts_by_files(None, checkpoints),
            checkpoints,
            machine_facts.gpu_devices(),
            cpu_build=False,
        )
        assert counted in finding.detail


@pytest.mark.usefixtures("gpus")
def test_a_start_warns_of_memory_that_may_not_suffice(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"tensor_parallel_size": "2", "max_model_len": "32768"}
    _refuse_unfit_models(load(given, {}, preset="llama-3.3-70b"), "llama-3.3-70b")
    assert "aerie: gpu memory: weights 65.8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, None),
        ({"tool_call_parser": "hermse"}, "tool_call_parser: vLLM has no hermse"),
    ],
)
def test_doctor_warns_of_a_parser_that_vllm_does_not_have(
    settings: dict[str, Any], words: str | None
) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    findings = examine(load({"k": "0", "port": "0", **settings}, {}, preset="embedded"))
    found = next((each for each in findings if each.check == "parser"), None)
    assert (found is None) is (words is None)
    if found is not None and words is not None:
        assert found.status == "warn"
        assert words in found.detail


def test_doctor_fails_where_the_start_refuses_keys_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[[keys]]")
    (tmp_path / "file").touch()
    learns = {"learn": str(tmp_path / "new" / "folder"), "k": "3"}
    rows: list[tuple[str, dict[str, str], str]] = [
        ("keys", {"keys_file": str(tmp_path / "none.toml")}, "FAIL"),
        ("keys", {"keys_file": str(tmp_path / "broken.toml")}, "FAIL"),
        ("learn", {**learns, "learn": str(tmp_path / "file")}, "FAIL"),
        ("learn", {**learns, "learn": str(tmp_path / "file" / "folder")}, "FAIL"),
        ("learn", {**learns, "learn": "/proc/learn"}, "FAIL"),
        ("learn", learns, "ok"),
    ]
    for check, settings, status in rows:
        findings = examine(load({"k": "0", "port": "0", **settings}, {}, preset="embedded"))
        assert [each.status for each in findings if each.check == check] == [status], settings
    assert not (tmp_path / "new").exists()


def test_memory_of_a_cpu_counts_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[float] = []
    monkeypatch.setattr(
        machine,
        "check_memory",
        lambda free, gib, kv: weights.append(gib) or report.ok("memory", ""),
    )
    monkeypatch.setattr(machine_facts, "version_of", lambda name: "0.32.0")
    for k in ("0", "3"):
        examine(load({"k": k, "port": "0", "dtype": "bfloat16"}, {}, preset="embedded"))
    assert weights[1] > weights[0] > 0
