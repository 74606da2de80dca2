"""Packages from an archive: unpacked once, and the plugin registered without pip."""

from __future__ import annotations

import random
import tarfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from bench.gpu_check.check import REPOSITORY
from bench.gpu_check.offline import environment, register, unpack, without_archive


def archive(folder: Path, name: str, content: str) -> Path:
    source = folder / "source.py"
    source.write_text(content)
    with tarfile.open(folder / "packages.tar.xz", "w:xz") as tar:
        tar.add(source, name)
    return folder / "packages.tar.xz"


def test_an_archive_is_unpacked_once_and_again_if_it_changes(tmp_path: Path) -> None:
    site = unpack(archive(tmp_path, "one/a.py", "1"), tmp_path / "site")
    (site / "one" / "a.py").write_text("kept")
    assert unpack(tmp_path / "packages.tar.xz", site) == site
    assert (site / "one" / "a.py").read_text() == "kept"
    unpack(archive(tmp_path, "two/b.py", "2"), site)
    assert not (site / "one").exists() and (site / "two" / "b.py").read_text() == "2"


def test_a_damaged_archive_counts_as_not_unpacked(tmp_path: Path) -> None:
    whole = archive(tmp_path, "one/a.py", "1").read_bytes()
    (tmp_path / "packages.tar.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(tmp_path / "packages.tar.xz", tmp_path / "site")
    (tmp_path / "packages.tar.xz").write_bytes(whole)
    assert (unpack(tmp_path / "packages.tar.xz", tmp_path / "site") / "one" / "a.py").exists()


@pytest.mark.parametrize("missing", [1, 60, 5000])
def test_an_archive_that_was_cut_off_is_damaged(tmp_path: Path, missing: int) -> None:
    """Catches: an EOFError as a traceback; an end that is missing, which no file needed."""
    content = random.Random(0).randbytes(20_000).hex()
    cut = archive(tmp_path, "one/a.py", content)
    cut.write_bytes(cut.read_bytes()[:-missing])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack(cut, tmp_path / "site")
    unpack(archive(tmp_path, "one/a.py", content), tmp_path / "site")


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "mine").write_text("work")
    with pytest.raises(ValueError, match="give another folder as --site"):
        unpack(archive(tmp_path, "one/a.py", "1"), site)
    assert (site / "mine").read_text() == "work"


def test_the_plugin_is_found_without_an_installation(tmp_path: Path) -> None:
    register(REPOSITORY, tmp_path)
    register(REPOSITORY, tmp_path)  # as at a second check
    (found,) = distributions(path=[str(tmp_path)])
    assert found.metadata["Name"] == "aerie"
    points = {(point.group, point.name): point.value for point in found.entry_points}
    assert points["vllm.general_plugins", "aerie"] == "drafters.vllm.plugin:register"
    assert points["console_scripts", "aerie"] == "app.cli:run"


def test_the_second_process_gets_all_options_but_the_archive() -> None:
    given = ["--archive", "a", "--minutes", "3", "--site=s", "--parts=smoke"]
    assert without_archive(given) == ["--minutes", "3", "--parts=smoke"]


def test_packages_and_source_come_first_and_what_is_set_stays() -> None:
    given = {"PYTHONPATH": "/mine", "VLLM_CACHE_ROOT": "/cache"}
    found = environment(given, Path("/there/site"), Path("/there/aerie"))
    assert found["PYTHONPATH"] == "/there/site:/there/aerie:/mine"
    assert found["VLLM_CACHE_ROOT"] == "/cache"
    assert found["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
