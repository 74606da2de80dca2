"""A gateway's folder for temporary files, and what a start removes of others."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from app.errors import StartupError
from app.server import runtime_directory
from app.server.runtime_directory import (
    LIST,
    MAX_SOCKET_FOLDER,
    PREFIX,
    RuntimeDirectory,
    remove_leftovers,
)


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def segment() -> Iterator[Path]:
    made = SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{made.name}", "shared_memory")  # it may go in the test
    path = Path("/dev/shm") / made.name
    yield path
    made.close()
    path.unlink(missing_ok=True)


def kill(directory: RuntimeDirectory) -> None:
    """Give up the lock, as the system does for a process that ends, and leave the rest."""
    os.close(directory._lock)


def dead(base: Path, listed: object) -> Path:
    """The folder of a gateway that was killed."""
    directory = RuntimeDirectory.create(base)
    (directory.path / LIST).write_text(listed if isinstance(listed, str) else json.dumps(listed))
    (directory.path / "folder").mkdir()
    (directory.path / "folder" / "file").write_text("")
    kill(directory)
    return directory.path


def test_segments_and_sockets_elsewhere_go_with_the_folder(base: Path, segment: Path) -> None:
    elsewhere = base / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(elsewhere))
        directory = RuntimeDirectory.create(base)
        directory.note([segment, elsewhere])
        remove_leftovers(base)
        assert elsewhere.exists()
        assert directory.path.exists()
        assert segment.exists()
        kill(directory)
        remove_leftovers(base)
    assert list(base.iterdir()) == []
    assert not segment.exists()


def test_a_name_that_is_somebody_elses_by_now_stays(base: Path, segment: Path) -> None:
    dead(base, [[str(segment), segment.stat().st_ino + 1]])
    remove_leftovers(base)
    assert list(base.iterdir()) == []
    assert segment.exists()


@pytest.mark.parametrize("place", ["", "folder"])
def test_nothing_but_segments_and_sockets_is_removed_elsewhere(base: Path, place: str) -> None:
    file = base / place / "file"
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    dead(base, [[str(file), file.stat().st_ino], ["/dev/shm/../null", 1], ["relative", 1]])
    remove_leftovers(base)
    assert file.exists()


@pytest.mark.parametrize("listed", ["", "[", "{}", "3", '[["/a"]]', '[["\\u0000", 1]]', "[[1, 2]]"])
def test_a_list_that_was_cut_off_is_no_obstacle(base: Path, listed: str) -> None:
    dead(base, listed)
    remove_leftovers(base)
    assert list(base.iterdir()) == []


def test_what_no_gateway_made_stays(base: Path) -> None:
    (base / "target").mkdir()
    (base / "target" / "file").write_text("")
    (base / f"{PREFIX}link").symlink_to(base / "target")
    (base / f"{PREFIX}file").write_text("")
    (base / "aerie-quality-abc").mkdir()
    before = sorted(base.rglob("*"))
    remove_leftovers(base)
    assert sorted(base.rglob("*")) == before


def test_starts_at_the_same_time_spare_each_other(base: Path) -> None:
    """A folder that another start finds before it is locked looks like one left behind."""
    failures: list[str] = []

    def starts() -> None:
        for _ in range(100):
            remove_leftovers(base)
            directory = RuntimeDirectory.create(base)
            try:
                (directory.path / "socket").write_text("")
                remove_leftovers(base)
                (directory.path / "socket").read_text()
            except OSError as error:
                failures.append(str(error))
            directory.remove()

    threads = [threading.Thread(target=starts) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(base.iterdir()) == []


def test_a_folder_that_is_taken_before_it_is_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def taken(**options: object) -> str:
        made.append(mkdtemp(**options))  # type: ignore[call-overload]
        if len(made) < 3:
            remove_leftovers(base)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    directory = RuntimeDirectory.create(base)
    assert str(directory.path) == made[2]
    assert directory.path.is_dir()
    directory.remove()


def test_temporary_files_go_into_the_folder_and_with_it(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    with runtime_directory.runtime_directory() as directory:
        assert directory.path.parent == base
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert tempfile.mkdtemp().startswith(f"{directory.path}/")
        assert os.environ["TMPDIR"] == str(directory.path)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == base, "a cache stays"
    assert list(base.iterdir()) == []
    assert dict(os.environ) == before
    assert tempfile.gettempdir() == str(base)


def test_the_compilers_cache_is_where_torch_has_it(base: Path) -> None:
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore
    file = Path(torch) / "_inductor" / "runtime" / "cache_dir_utils.py"
    # Alone: the package around it takes half a minute to import.
    spec = importlib.util.spec_from_file_location("cache_dir_utils", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    environ = runtime_directory._environment(Path(tempfile.gettempdir()), base, {})
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == module.default_cache_dir()


def test_what_the_operator_has_set_stays() -> None:
    given = {"TORCHINDUCTOR_CACHE_DIR": "/cache", "VLLM_RPC_BASE_PATH": "/run"}
    changed = runtime_directory._environment(Path("/tmp"), Path("/tmp") / ("x" * 90), given)
    assert set(changed) == {"TMPDIR"}


@pytest.mark.parametrize("beyond", [0, 1])
def test_sockets_in_a_folder_with_a_long_name(base: Path, beyond: int) -> None:
    folder = base / ("x" * (MAX_SOCKET_FOLDER - len(str(base)) - 1 + beyond))
    folder.mkdir()
    changed = runtime_directory._environment(base, folder, {})
    assert changed.get("VLLM_RPC_BASE_PATH") == (str(base) if beyond else None)
    with socket.socket(socket.AF_UNIX) as listener:
        if beyond:
            with pytest.raises(OSError, match="too long"):
                listener.bind(f"{folder}/{uuid.uuid4()}")
        else:
            listener.bind(f"{folder}/{uuid.uuid4()}")


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with (
        pytest.raises(StartupError, match=r"/nonexistent.*TMPDIR"),
        runtime_directory.runtime_directory(),
    ):
        pass
