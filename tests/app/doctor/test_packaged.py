"""A packaged target: what is said before it is converted, after, and when it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from app.doctor import models
from app.doctor import packaged as doctor
from app.doctor.examination import check_start
from app.doctor.report import Finding
from app.settings import load
from drafters import packaged
from drafters.packaged import MODELS, PackagedModelError

NAME = "packaged:smollm2-135m"
MODEL = MODELS["smollm2-135m"]
# HuggingFaceTB/SmolLM2-135M-Instruct's own config.json, as far as a head depends on it.
ORIGINAL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "vocab_size": 49152,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
HEAD = models.Checkpoint(
    folder="head",
    config={
        "architectures": ["LlamaForCausalLMEagle3"], "intermediate_size": 1536,
        "num_attention_heads": 9,
        "hidden_size": 576, "target_hidden_size": 576, "vocab_size": 49152, "ptd_token_id": 3,
        "num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "max_position_embeddings": 8192, "dtype": "bfloat16",
    },
    trained_k=8,
)  # fmt: skip


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package installed, nothing converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packaged, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(packaged.PackagedModel, "source", lambda self: Path("/site/x.gguf"))
    return tmp_path


def findings(**settings: Any) -> dict[str, Finding]:
    return {found.check: found for found in check_start(load({"model": NAME, **settings}, {}))}


def test_before_the_first_start_it_says_what_that_will_do() -> None:
    found = findings(k=0)
    assert found["packaged"].status == "ok"
    assert "not converted yet: the first start makes 272 MB of x.gguf" in found["packaged"].detail
    assert found["model"].detail == "LlamaForCausalLM, vocabulary 49152, length 8192"


def test_a_head_is_checked_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    target = doctor.read(NAME)
    assert isinstance(target, models.Checkpoint)
    assert models.check_head(HEAD, target, 8).status == "ok"
    assert findings(drafter=str(tmp_path / "none"))["head"].status == "FAIL"
    embedded = Path(__file__).parents[3] / "models" / "embedded" / "p-eagle"
    assert "made for another model" in findings(drafter=str(embedded))["head"].detail


def test_the_head_fits_the_original_as_well() -> None:
    original = models.Checkpoint(folder="HuggingFaceTB/SmolLM2-135M-Instruct", config=ORIGINAL)
    assert models.check_head(HEAD, original, 8).status == "ok"


def test_a_full_disk_fails_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 50_000_000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = findings(k=0)["packaged"]
    assert found.status == "FAIL" and "has 50 MB, it takes 272 MB" in found.detail
    assert "XDG_CACHE_HOME" in (found.remedy or "")


def test_what_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", ("no_such_library", "json"))
    found = findings(k=0)["packaged"]
    assert found.status == "FAIL" and "no_such_library not installed" in found.detail

    def missing(self: packaged.PackagedModel) -> Path:
        raise PackagedModelError("no package", "make install")

    monkeypatch.setattr(packaged.PackagedModel, "source", missing)
    found = findings(k=0)["packaged"]
    assert (found.status, found.detail, found.remedy) == ("FAIL", "no package", "make install")


def test_an_unknown_name_lists_the_known_ones() -> None:
    found = findings(model="packaged:nope", k=0)
    assert found["model"].status == found["packaged"].status == "FAIL"
    assert found["model"].remedy == "known: smollm2-135m"


def test_a_checkpoint_that_is_there_is_read(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = empty_cache / "aerie" / "packaged" / MODEL.folder_name
    folder.mkdir(parents=True)
    target = Path(__file__).parents[3] / "models" / "embedded" / "target"
    for file in target.iterdir():
        (folder / file.name).symlink_to(file)
    packaged._write_manifest(MODEL, folder)
    found = findings(k=0)
    assert found["packaged"].detail == f"converted: {folder}"
    assert found["model"].detail == "LlamaForCausalLM, vocabulary 8192, length 2048"


def test_a_folder_that_is_not_there_is_no_hub_id() -> None:
    """A preset's head by its path inside of this repository, before it is there."""
    found = findings(drafter="models/none/p-eagle")["head"]
    assert (found.status, found.detail) == ("FAIL", "models/none/p-eagle: no such folder")
