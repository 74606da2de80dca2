"""What is found on a CPU machine."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from app.engine.configuration.cpu import (
    compiler,
    cpu_machine,
    environment,
    free_memory,
    preload,
    threads,
)


def install(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / "usr/lib" / folder).mkdir(parents=True)
        (root / "usr/lib" / folder / "libtcmalloc_minimal.so.4").touch()


@pytest.fixture
def without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "app.engine.configuration.cpu.OPENMP_PACKAGE", "a-package-that-is-not-installed"
    )


@pytest.mark.usefixtures("without_openmp")
def test_tcmalloc_is_preloaded_where_it_is_installed(tmp_path: Path) -> None:
    assert preload({}, tmp_path) == ""
    install(tmp_path, "x86_64-linux-gnu", "i386-linux-gnu")
    assert preload({}, tmp_path) == f"{tmp_path}/usr/lib/i386-linux-gnu/libtcmalloc_minimal.so.4"


@pytest.mark.usefixtures("without_openmp")
def test_the_operators_own_choice_stays_first_and_is_not_doubled(tmp_path: Path) -> None:
    install(tmp_path, "x86")
    ours = f"{tmp_path}/usr/lib/x86/libtcmalloc_minimal.so.4"
    assert preload({"LD_PRELOAD": "/opt/a.so /opt/b.so"}, tmp_path) == f"/opt/a.so:/opt/b.so:{ours}"
    assert preload({"LD_PRELOAD": "/opt/libtcmalloc.so"}, tmp_path) == "/opt/libtcmalloc.so"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Intel's OpenMP is built for x86-64")
def test_intels_openmp_is_preloaded_unless_the_operator_names_a_runtime(tmp_path: Path) -> None:
    path = Path(preload({}, tmp_path))
    assert path.name == "libiomp5.so"
    assert path.exists()
    for runtime in ("/usr/lib/libgomp.so.1", "/opt/libomp.so", "/opt/libiomp5.so"):
        assert preload({"LD_PRELOAD": runtime}, tmp_path) == runtime
    folder_of_that_name = "/opt/libgomp/liba.so"
    assert preload({"LD_PRELOAD": folder_of_that_name}, tmp_path).endswith("libiomp5.so")


def test_threads_sleep_soon_while_they_wait_unless_the_operator_says_otherwise() -> None:
    assert environment({})["KMP_BLOCKTIME"] == "5"
    assert environment({"KMP_BLOCKTIME": "200"})["KMP_BLOCKTIME"] == "200"


def test_huge_pages_are_asked_for_unless_the_operator_does_not_want_them() -> None:
    assert environment({})["THP_MEM_ALLOC_ENABLE"] == "1"
    assert environment({"THP_MEM_ALLOC_ENABLE": "0"})["THP_MEM_ALLOC_ENABLE"] == "0"
    own = {"LD_PRELOAD": "/opt/libtcmalloc.so:/opt/libomp.so"}
    assert environment(own)["LD_PRELOAD"] == own["LD_PRELOAD"]


def machine(root: Path, monkeypatch: pytest.MonkeyPatch, cores: int, nodes: int = 1) -> Path:
    """One whose cores have two threads each, as far as /sys tells."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2 * cores)))
    for number in range(2 * cores):
        cpu = root / f"sys/devices/system/cpu/cpu{number}"
        (cpu / "topology").mkdir(parents=True)
        first = number % cores
        (cpu / "topology/thread_siblings_list").write_text(f"{first},{first + cores}\n")
        (cpu / f"node{first * nodes // cores}").touch()
    return root


def limit(root: Path, text: str) -> None:
    for folder in ("proc/self", "sys/fs/cgroup"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/\n")
    mount = "31 23 0:28 / /sys/fs/cgroup ro shared:4 - cgroup2 cgroup rw,nsdelegate\n"
    (root / "proc/self/mountinfo").write_text(mount)
    (root / "sys/fs/cgroup/cpu.max").write_text(f"{text}\n")


@pytest.mark.parametrize(("cores", "used"), [(1, 1), (2, 2), (7, 7), (8, 7), (32, 31)])
def test_the_model_takes_all_cores_but_one_of_many(
    cores: int, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert threads({}, machine(tmp_path, monkeypatch, cores)) == used


def test_a_container_has_the_cores_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, monkeypatch, 32)
    for text, used in {"max 100000": 31, "250000 100000": 2, "50000 100000": 1}.items():
        limit(root, text)
        assert threads({}, root) == used


def test_where_a_cpu_has_several_nodes_or_cores_were_given_vllm_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, monkeypatch, 4)
    assert threads({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, root) is None
    assert threads({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, root) is None
    assert threads({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, root) == 4
    assert threads({"OMP_NUM_THREADS": "3"}, root) == 3
    assert threads({"OMP_NUM_THREADS": "3,1"}, root) is None
    assert threads({"VLLM_CPU_NUM_OF_RESERVED_CPU": "2"}, root) == 2
    assert threads({"VLLM_CPU_NUM_OF_RESERVED_CPU": "9"}, root) == 1
    assert threads({}, machine(tmp_path / "two", monkeypatch, 4, nodes=2)) is None


def test_the_engine_is_told_how_many_threads() -> None:
    assert environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment({"VLLM_CPU_OMP_THREADS_BIND": "1"})


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


def test_a_container_has_the_memory_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a KV cache of a quarter of the host, which vLLM refuses within the limit."""
    available = psutil.virtual_memory().available
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    module = "app.engine.configuration.cpu.headroom"
    for limit, free in ((None, available), (available // 4, available // 4), (2**60, available)):
        monkeypatch.setattr(module, lambda root, limit=limit: limit)
        assert free_memory(tmp_path) == cpu_machine().free_memory == free
