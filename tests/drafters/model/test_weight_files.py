"""Weight files that are not whole, or not all there, are named; nothing reads their tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app import cli
from app.doctor.pair import check_models
from app.doctor.report import Finding
from app.settings import REPOSITORY, load
from drafters.model.weight_files import MissingShardError, Weights, read_weights

EMBEDDED = REPOSITORY / "models" / "embedded"
SHARDS = 3


def embedded(folder: Path, *, kind: str = "model") -> Path:
    """A copy of the embedded target, or of its head."""
    source = EMBEDDED / ("target" if kind == "model" else "p-eagle")
    return Path(shutil.copytree(source, folder))


def shard(folder: Path, *, index: bool = True) -> list[Path]:
    """Cut the folder's only weight file into SHARDS files, as transformers names them."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for number in range(SHARDS):
        file = folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::SHARDS]}
        save_file(part, file)
        weight_map |= dict.fromkeys(part, file.name)
        files.append(file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return files


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of six tensors in one file."""
    tensors = {f"layers.{n}.weight": torch.full((4, 3), float(n)) for n in range(6)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def finding(kind: str, folder: Path) -> Finding:
    """What doctor says of `folder` as the target or the head of a pair."""
    pair = {"model": str(EMBEDDED / "target"), "drafter": str(EMBEDDED / "p-eagle")}
    pair["model" if kind == "model" else "drafter"] = str(folder)
    [found] = [each for each in check_models(load(pair, {}))[0] if each.check == kind]
    return found


def cut(file: Path, size: int) -> None:
    """What a copy that stopped leaves."""
    with file.open("r+b") as stream:
        stream.truncate(size)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_truncated_file_fails_with_its_sizes(tmp_path: Path, kind: str) -> None:
    folder = embedded(tmp_path / "copy", kind=kind)
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    cut(file, whole // 2)
    found = finding(kind, folder)
    assert found.status == "FAIL"
    assert f"model.safetensors is truncated: {whole // 2:,} bytes of {whole:,}" in found.detail
    assert found.remedy is not None and "download it again" in found.remedy


@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, kind: str, index: bool) -> None:
    """With an index, and without one by the count in the names of the others."""
    folder = embedded(tmp_path / "copy", kind=kind)
    files = shard(folder, index=index)
    assert finding(kind, folder).status == "ok"
    files[1].unlink()
    found = finding(kind, folder)
    assert found.status == "FAIL"
    assert f"{files[1].name} is missing" in found.detail


def test_a_start_is_refused_before_an_engine_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = embedded(tmp_path / "copy")
    cut(folder / "model.safetensors", 1_000_000)
    assert cli.main(["serve", "--preset", "embedded", "--model", str(folder)]) == cli.EXIT_FAILED
    message = capsys.readouterr().err
    assert message.startswith(f"aerie: model: {folder}: model.safetensors is truncated")
    assert message.count("\n") == 1


@given(keep=st.floats(0, 1, exclude_max=True, allow_subnormal=False))
def test_no_prefix_of_a_file_passes(tmp_path_factory: pytest.TempPathFactory, keep: float) -> None:
    folder = tmp_path_factory.mktemp("prefix")
    save_file({"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.float16)}, folder / "m")
    content = (folder / "m").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors (is|has)"):
        read_weights(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a safetensors file: a pointer"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file: a pointer"),
        ((4).to_bytes(8, "little") + b"oops", "has a damaged header"),
        ((2).to_bytes(8, "little") + b"[]", "has a damaged header"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "has a damaged header"),
        ((90).to_bytes(8, "little") + b"{", "is truncated: 9 bytes, its header alone has 90"),
    ],
)
def test_what_is_no_weight_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors {problem}"):
        read_weights(tmp_path)


def test_bytes_that_no_tensor_owns_are_an_error(small: Path) -> None:
    file = small / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"tail")
    with pytest.raises(ValueError, match=f"has {size + 4} bytes, its header describes {size}"):
        read_weights(small)


@pytest.mark.parametrize("spans", [[(0, 8), (4, 12)], [(0, 4), (8, 12)], [(4, 12)], [(0, -1)]])
def test_tensors_that_overlap_or_leave_gaps_are_an_error(
    tmp_path: Path, spans: list[tuple[int, int]]
) -> None:
    header = json.dumps(
        {
            str(n): {"dtype": "U8", "shape": [1], "data_offsets": span}
            for n, span in enumerate(spans)
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(12)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors has a damaged header"):
        read_weights(tmp_path)


def shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in weights.tensors.items()}


def test_shards_count_together(small: Path) -> None:
    whole = read_weights(small)
    files = shard(small)
    weights = read_weights(small)
    assert shapes(weights) == shapes(whole)
    assert weights.size == sum(file.stat().st_size for file in files)


def test_only_files_of_the_index_are_looked_at(small: Path) -> None:
    """As vLLM loads them: what else lies there, broken or not, is not the model."""
    shard(small)
    size = read_weights(small).size
    (small / "adapter.safetensors").write_bytes(b"broken")
    assert read_weights(small).size == size


def test_a_tensor_in_another_shard_than_the_index_says(small: Path) -> None:
    files = shard(small)
    files[0].write_bytes(files[2].read_bytes())
    with pytest.raises(ValueError, match=r"00001-of-00003\.safetensors has no tensor layers"):
        read_weights(small)


def test_many_missing_shards_are_counted(small: Path) -> None:
    for file in shard(small)[:2]:
        file.unlink()
    with pytest.raises(MissingShardError, match=r"00001-of.* and model-00002-of.* are missing"):
        read_weights(small)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named(small: Path, text: str) -> None:
    (small / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json "):
        read_weights(small)


def test_mistral_layout_is_taken_first(small: Path) -> None:
    save_file({"tok": torch.zeros(2)}, small / "consolidated.safetensors")
    assert set(read_weights(small).tensors) == {"tok"}
