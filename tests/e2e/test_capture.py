"""What a gateway with `--learn` writes of its traffic, and what it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from app.admission import key_file
from app.settings import REPOSITORY
from drafters.learning import captured, load_signal
from drafters.learning.captured import Captured
from tests.waiting import until

from .gateway import MODEL, Gateway
from .wire import metric

TARGET = REPOSITORY / "models" / "embedded" / "target"
COUNTED = "aerie_learning_captured_sequences_total"
DROPPED = "aerie_learning_dropped_sequences_total"
STOPPED = "aerie_learning_capture_stopped"
TENANTS: dict[str, dict[str, object]] = {"search": {}, "mail": {}, "law": {"learn": False}}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def unharmed() -> None:
    """In place of the check of the shared gateway, which these tests do not use."""


class Served:
    """A gateway that captures, and its tenants' clients."""

    def __init__(self, gateway: Gateway, folder: Path, keys: dict[str, str]) -> None:
        self.gateway, self.folder = gateway, folder
        self.clients = {
            tenant: httpx.Client(
                base_url=gateway.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
                trust_env=False,
            )
            for tenant, key in keys.items()
        }

    def complete(self, tenant: str, **changes: Any) -> dict[str, Any]:
        asked = {"model": MODEL, "prompt": "def read(", "temperature": 0, "ignore_eos": True}
        answer = self.clients[tenant].post("/v1/completions", json=asked | changes)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def sequences(self) -> list[Captured]:
        return list(captured.read(self.folder / captured.FOLDER))

    def wait_for(self, count: float) -> None:
        """Until so many sequences were written."""
        until(lambda: self.count >= count)

    @property
    def count(self) -> float:
        return metric(self.clients["search"], COUNTED)


def launch(tmp_path: Path, folder: Path) -> Served:
    keys = {}
    for tenant, limits in TENANTS.items():
        file, now = tmp_path / "keys.toml", datetime.now(UTC)
        _, keys[tenant] = key_file.create(file, tenant, limits, admin=True, now=now)
    options = ["--learn", str(folder), "--no-learn-train", "--learn-exclude", "mail"]
    options += ["--keys-file", str(file), "--enforce-eager"]
    gateway = Gateway.launch(tmp_path / "gateway.log", options)
    try:
        return Served(gateway.wait_ready(), folder, keys)
    except BaseException:
        gateway.kill()
        raise


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("learning")
    made = launch(place, place / "learn")
    yield made
    made.gateway.kill()


def steps_fit(sequence: Captured) -> bool:
    """Whether the steps make the answer, but for what the last one made beyond its end."""
    made = sum(1 + accepted for _, accepted in sequence.steps)
    last = sequence.steps[-1][1] if sequence.steps else 0
    return 0 <= made - len(sequence.answer) <= last


def test_what_was_served_can_be_read_back(learning: Served) -> None:
    before = learning.count
    learning.clients["search"].patch("/v1/speculation", json={"objective": "fixed", "k": 5})
    answer = learning.complete("search", max_tokens=100, prompt="class Reader:", n=2)
    assert "per_step_drafted" not in str(answer)
    learning.wait_for(before + 2)
    *_, first, second = learning.sequences()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for sequence, choice in zip((first, second), answer["choices"], strict=True):
        assert tokenizer.decode(list(sequence.prompt)) == "class Reader:"
        assert tokenizer.decode(list(sequence.answer)) == choice["text"]
        assert (sequence.tenant, sequence.generation) == ("search", 0)
        assert abs(sequence.at - time.time()) < 60
        assert steps_fit(sequence)
        drafted, accepted = map(sum, zip(*sequence.steps, strict=True))
        assert drafted > accepted > 0


def test_stop_strings_token_reports_and_streams_have_steps_too(learning: Served) -> None:
    before = learning.count
    prompts = ["import os\n", "def area(width", "for name in"]
    answers = [learning.complete("search", max_tokens=60, prompt=prompt) for prompt in prompts]
    text = answers[1]["choices"][0]["text"]
    stop = next(
        text[at : at + 9] for at in range(100, len(text)) if text.find(text[at : at + 9]) == at
    )
    stopped = learning.complete("search", max_tokens=60, prompt=prompts[1], stop=[stop])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    learning.complete("search", max_tokens=60, prompt=prompts[1], speculation={"tokens": True})
    learning.wait_for(before + 5)
    found = learning.sequences()[-5:]
    assert all(steps_fit(sequence) for sequence in found)
    assert all(sum(drafted for drafted, _ in sequence.steps) for sequence in found)


def test_who_is_excluded_and_what_is_short_is_not_written(learning: Served) -> None:
    before = learning.count
    for tenant in ("mail", "law"):
        learning.complete(tenant, max_tokens=40)
    learning.complete("search", max_tokens=15)
    learning.complete("search", max_tokens=20, use_beam_search=True, n=2)
    learning.complete("search", max_tokens=40, prompt="The last one")
    learning.wait_for(before + 1)
    assert learning.count == before + 1
    assert Counter(sequence.tenant for sequence in learning.sequences()).keys() == {"search"}
    names = [file.name for file in (learning.folder / captured.FOLDER).iterdir()]
    assert all(name.endswith("-search.jsonl") for name in names)
    modes = {path.stat().st_mode & 0o777 for path in (learning.folder / captured.FOLDER).iterdir()}
    assert modes == {0o600}


def test_a_client_that_leaves_is_captured_as_far_as_it_got(learning: Served) -> None:
    before = learning.count
    body = {"model": MODEL, "prompt": "def left(", "max_tokens": 1500, "ignore_eos": True}
    client = learning.clients["search"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number > 80:
                break
    learning.wait_for(before + 1)
    sequence = learning.sequences()[-1]
    assert 16 <= len(sequence.answer) < 1500
    assert sum(1 + accepted for _, accepted in sequence.steps) <= len(sequence.answer)


def test_the_load_is_told_while_requests_run(learning: Served) -> None:
    def requests() -> int:
        load = load_signal.read(learning.folder)
        assert load is not None
        assert time.monotonic() - load.at < 5
        return load.requests

    until(lambda: requests() == 0)
    running = threading.Thread(
        target=learning.complete, args=("mail",), kwargs={"max_tokens": 1000}
    )
    running.start()
    until(lambda: requests() == 1)
    running.join()
    until(lambda: requests() == 0)


def test_a_second_gateway_in_the_folder_is_refused(learning: Served, tmp_path: Path) -> None:
    second = Gateway.launch(tmp_path / "log", ["--learn", str(learning.folder)])
    assert second.wait_exit(60) == 2
    assert "another gateway learns in this folder" in second.text()


def test_a_kill_leaves_whole_sequences_and_the_next_gateway_goes_on(tmp_path: Path) -> None:
    first = launch(tmp_path, tmp_path / "learn")
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                first.complete("search", max_tokens=16)
            except httpx.TransportError:
                return

    clients = [threading.Thread(target=ask) for _ in range(8)]
    try:
        for client in clients:
            client.start()
        first.wait_for(40)
        assert first.gateway.process is not None
        os.kill(first.gateway.process.pid, signal.SIGKILL)
        stop.set()
        first.gateway.wait_exit(30)
        assert first.gateway.leftovers() == []
    finally:
        stop.set()
        first.gateway.kill()
        for client in clients:
            client.join()
    files = list((tmp_path / "learn" / captured.FOLDER).iterdir())
    whole = sum(file.read_bytes().count(b"\n") for file in files)
    assert len(first.sequences()) == whole >= 40
    (tmp_path / "keys.toml").unlink()
    second = launch(tmp_path, tmp_path / "learn")
    try:
        second.complete("search", max_tokens=16)
        second.wait_for(1)
        assert len(second.sequences()) == whole + 1
        assert second.gateway.stop() == 0
    finally:
        second.gateway.kill()


def test_a_full_disk_stops_capture_and_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "learn"
    folder.mkdir(mode=0o700)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=700", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    learning = None
    try:
        learning = launch(tmp_path, folder)
        learning.complete("search", max_tokens=16)
        learning.wait_for(1)
        with pytest.raises(OSError, match="No space"):
            (folder / "filling").write_bytes(b"x" * 2**20)
        for _ in range(30):  # what is left of the file's last page takes some
            learning.complete("search", max_tokens=200)
        search = learning.clients["search"]
        until(lambda: metric(search, STOPPED) == 1)
        dropped = metric(search, DROPPED)
        for _ in range(5):
            assert learning.complete("search", max_tokens=16)["usage"]["completion_tokens"] == 16
        assert metric(search, DROPPED) == dropped + 5
        assert search.get("/readyz").status_code == 200
        assert learning.gateway.text().count("nothing is captured for 60 s") == 1
        assert len(learning.sequences()) == learning.count
        assert learning.gateway.stop() == 0
    finally:
        if learning is not None:
            learning.gateway.kill()
        subprocess.run(["umount", "-l", str(folder)], check=True)
