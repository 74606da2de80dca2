"""What is found on a CPU machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.cpu import compiler, cpu_machine, environment, preload


def install(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / "usr/lib" / folder).mkdir(parents=True)
        (root / "usr/lib" / folder / "libtcmalloc_minimal.so.4").touch()


def test_tcmalloc_is_preloaded_where_it_is_installed(tmp_path: Path) -> None:
    assert preload({}, tmp_path) == ""
    install(tmp_path, "x86_64-linux-gnu", "i386-linux-gnu")
    assert preload({}, tmp_path) == f"{tmp_path}/usr/lib/i386-linux-gnu/libtcmalloc_minimal.so.4"


def test_the_operators_own_choice_stays_first_and_is_not_doubled(tmp_path: Path) -> None:
    install(tmp_path, "x86")
    ours = f"{tmp_path}/usr/lib/x86/libtcmalloc_minimal.so.4"
    assert preload({"LD_PRELOAD": "/opt/a.so /opt/b.so"}, tmp_path) == f"/opt/a.so:/opt/b.so:{ours}"
    assert preload({"LD_PRELOAD": "/opt/libtcmalloc.so"}, tmp_path) == "/opt/libtcmalloc.so"


def test_huge_pages_are_asked_for_unless_the_operator_does_not_want_them() -> None:
    assert environment({})["THP_MEM_ALLOC_ENABLE"] == "1"
    assert environment({"THP_MEM_ALLOC_ENABLE": "0"})["THP_MEM_ALLOC_ENABLE"] == "0"
    assert environment({"LD_PRELOAD": "/opt/libtcmalloc.so"})["LD_PRELOAD"] == "/opt/libtcmalloc.so"


def test_the_compiler_is_the_one_torch_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler() is None
    assert not cpu_machine().can_compile
    other = tmp_path / "clang++"
    other.touch(mode=0o755)
    monkeypatch.setenv("CXX", "clang++")
    assert compiler() == str(other)
