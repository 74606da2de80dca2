"""A redis-server of the tests' own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import reserved_port


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a redis-server with its files in a folder; gives its URL."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    port = reserved_port()
    arguments = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    log = (folder / "log").open("wb")
    process = subprocess.Popen([*arguments, "--dir", str(folder)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while b"Ready to accept connections" not in (folder / "log").read_bytes():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
        log.close()
