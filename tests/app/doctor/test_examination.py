"""What a start refuses by the models' files and by memory, and what it leaves to vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli import _refuse_unfit_models
from app.doctor import examination, report
from app.doctor.examination import check_start, examine
from app.doctor.gpus import GpuDevice
from app.doctor.models import Checkpoint, read_checkpoint
from app.settings import load
from drafters.model.weight_files import StoredTensor

TARGET = Path(__file__).parents[3] / "models" / "embedded" / "target"


def failures(settings: dict[str, Any], preset: str | None = None) -> list[str]:
    """What a start fails for. `engine_args` are an object here."""
    given = {name: value for name, value in settings.items() if name != "engine_args"}
    if arguments := settings.get("engine_args"):
        given["engine_args"] = json.dumps(arguments)
    findings = check_start(load({"k": "0", **given}, {}, preset=preset), preset)
    return [
        f"{finding.check}: {finding.detail}" for finding in findings if finding.status == "FAIL"
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded target without a tokenizer."""
    for file in TARGET.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


OVER = {"max_model_len": "99999"}


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({**OVER, "engine_args": {"hf_overrides": {"max_position_embeddings": 99999}}}, {}),
        (OVER, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
        ({"model": "s3://bucket/model"}, {}),
        ({"model": "s3://bucket/model", "engine_args": {"load_format": "runai_streamer"}}, {}),
    ],
)
def test_what_vllm_may_serve_is_not_refused(
    settings: dict[str, Any], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert failures({"model": str(TARGET), **settings}) == []


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ({"tokenizer": str(TARGET)}, []),
        ({"tokenizer_mode": "custom"}, []),
        ({}, ["tiktoken.model"]),
        ({}, ["vocab.json", "merges.txt"]),
    ],
)
def test_a_tokenizer_of_another_kind_is_not_refused(
    arguments: dict[str, Any], files: list[str], folder: Path
) -> None:
    for name in files:
        (folder / name).touch()
    assert failures({"model": str(folder), "engine_args": arguments}) == []


def test_weights_of_another_format_are_not_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").touch()
    assert failures({"model": str(folder), "engine_args": {"load_format": "tensorizer"}}) == []


def test_what_is_plainly_wrong_is_refused(folder: Path) -> None:
    """Also beside an option that decides something else."""
    offload = {"engine_args": {"cpu_offload_gb": 10}}
    assert "over the model's" in failures({"model": str(TARGET), **OVER, **offload})[0]
    assert "no tokenizer" in failures({"model": str(folder), **offload})[0]
    assert "no such folder" in failures({"model": str(folder / "none")})[0]
    tokenizer = {"engine_args": {"tokenizer": str(TARGET)}}
    assert "over the model's" in failures({"model": str(folder), **OVER, **tokenizer})[0]


@pytest.mark.parametrize(
    "name", ["qwen3:8b", "org/model-GGUF:Q4_K_M", "model.gguf", "./model.gguf"]
)
def test_what_other_servers_take_for_a_model_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a traceback of the hub's library."""
    monkeypatch.chdir(tmp_path)
    if ":" not in name:
        (tmp_path / name).touch()
    (finding,) = (f for f in check_start(load({"model": name, "k": "0"}, {})) if f.check == "model")
    assert finding.status == "FAIL" and name in finding.detail
    assert finding.remedy is not None and finding.remedy.startswith("--model with a folder")


@pytest.mark.parametrize("name", ["a" * 300, "/" + "a" * 300])
def test_a_name_that_the_system_refuses_is_a_finding(name: str) -> None:
    """The fault: a traceback, as for a folder within one that this user may not read."""
    assert "File name too long" in failures({"model": name})[0]


def test_a_chat_template_that_is_no_text_is_a_finding(tmp_path: Path) -> None:
    """The fault: a traceback."""
    (tmp_path / "template").write_bytes(b"\xff")
    (problem,) = failures({"model": str(TARGET), "chat_template": str(tmp_path / "template")})
    assert problem.endswith("no text in UTF-8")


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
    settings: dict[str, Any], layers: list[str] | None, left_out: bool, folder: Path
) -> None:
    """The fault: doctor said that drafts are looked up, and the start took the path no-drafts."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": layers}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    findings = {
        finding.check: finding.detail
        for finding in examine(load({"model": str(folder), "port": "0", **settings}, {}))
    }
    assert ("--lookup-k asks for them" in findings["head"]) is left_out
    assert findings["start path"].startswith("no-drafts") is (left_out or "k" in settings)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs of 79.6 GiB, and vLLM's build for them."""
    devices = [GpuDevice(str(i), f"GPU-{i}", "H100", 79.6, "580.1") for i in range(4)]
    monkeypatch.setattr(examination, "_gpus", lambda: devices)
    monkeypatch.setattr(examination, "_version", lambda _: None)
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
        (finding,) = examination._check_memory(
            load({"model": "a/b", "drafter": "head"}, {}),
            None,
            {"model": read_checkpoint(TARGET), "head": found},
            examination._gpus(),
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


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"),
    [
        ({"dtype": "bfloat16"}, "auto", 1),
        ({"dtype": "bfloat16"}, "float32", 2),
        ({"torch_dtype": "float32"}, "bfloat16", 0.5),
        ({"dtype": "bfloat16", "quantization_config": {}}, "float32", 1),
    ],
)
def test_memory_counts_weights_in_the_type_that_they_are_loaded_in(
    stored: dict[str, Any], dtype: str, factor: float
) -> None:
    checkpoint = Checkpoint("folder", stored, weights_bytes=100)
    assert checkpoint.bytes_in(dtype) == 100 * factor


def test_memory_of_a_cpu_counts_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[float] = []
    monkeypatch.setattr(
        examination.machine,
        "check_memory",
        lambda free, gib, kv: weights.append(gib) or report.ok("memory", ""),
    )
    monkeypatch.setattr(examination, "_version", lambda name: "0.32.0")
    for k in ("0", "3"):
        examine(load({"k": k, "port": "0", "dtype": "bfloat16"}, {}, preset="embedded"))
    assert weights[1] > weights[0] > 0
