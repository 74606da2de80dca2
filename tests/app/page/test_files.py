"""The page's files: what is served, with which headers, to whom; and whether they fit their
sources."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.engine.supervisor import Phase
from app.main import create_app
from app.page.figures import PATH, SAMPLES
from app.page.files import CONTENT_SECURITY_POLICY, FILES, STATIC
from app.settings import load
from tests.app.phased_engine import PhasedEngine

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = REPOSITORY / "page"
BUNDLE = json.loads((STATIC.parent / "bundle.json").read_text("utf-8"))


class Waiting(PhasedEngine):
    """Never ready."""

    async def run(self, on_ready: object) -> None:
        self.phase = Phase.LOADING


@contextmanager
def client(**settings: str) -> Iterator[TestClient]:
    tree = load(settings, {}, preset="embedded")
    with TestClient(create_app(tree, Waiting(tree))) as found:
        yield found


def test_files_come_with_every_protection_and_a_tag() -> None:
    with client() as http:
        for path, name in FILES.items():
            response = http.get(path)
            assert response.content == (STATIC / name).read_bytes()
            headers = response.headers
            assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-cache"
            again = http.get(path, headers={"if-none-match": f'"other", W/{headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == headers["etag"]
            head = http.head(path)
            assert (head.status_code, head.content) == (200, b"")


def test_the_policy_allows_nothing_inline_and_nobody_else() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    html = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|https?://", html)
    assert sum((STATIC / name).stat().st_size for name in FILES.values()) < 300_000


def test_it_can_be_turned_off() -> None:
    with client(page="false") as http:
        for path in (*FILES, PATH):
            assert http.get(path).status_code == 404


def test_files_need_no_key_and_figures_do(tmp_path: Path) -> None:
    with client(api_key="sk-secret") as http:
        assert all(http.get(path).status_code == 200 for path in FILES)
        for path in ("/page/app.js/", "/page/", "/page"):
            assert http.get(path).status_code == 401, path
        refused = http.get(PATH)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        shown = http.get(PATH, headers={"authorization": "Bearer sk-secret"}).json()
        assert shown["phase"] == "loading"
        assert shown["retry_after_s"] > 0
        assert shown["counters"] is None and shown["speculation"] is None


def test_the_page_is_no_part_of_the_api() -> None:
    with client() as http:
        assert not [path for path in http.get("/openapi.json").json()["paths"] if "page" in path]


def test_the_figures_exist_in_vllm() -> None:
    """A name that vLLM changed would be a figure that stays 0 for ever."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.metrics import loggers

    source = Path(str(loggers.__file__)).read_text("utf-8")
    for sample in SAMPLES.values():
        assert f'"{re.sub("_(total|sum|count)$", "", sample)}"' in source


def test_the_bundle_fits_its_sources() -> None:
    """`make page` was run after the last change, and nobody edited what it wrote."""
    for folder, files in ((SOURCES, BUNDLE["sources"]), (STATIC, BUNDLE["files"])):
        for name, digest in files.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    known = {f"src/{file.name}" for file in (SOURCES / "src").iterdir()}
    assert known <= set(BUNDLE["sources"])
    assert {file.name for file in STATIC.iterdir()} == set(BUNDLE["files"]) == set(FILES.values())


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@pytest.mark.skipif(
    not (SOURCES / "node_modules").is_dir(), reason="page/node_modules is not installed (make page)"
)
def test_the_bundle_is_reproducible(tmp_path: Path) -> None:
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=SOURCES, check=True)
    for name in BUNDLE["files"]:
        assert (tmp_path / "static" / name).read_bytes() == (STATIC / name).read_bytes()
    for name in ("bundle.json", "LICENSES.md"):
        assert (tmp_path / name).read_bytes() == (STATIC.parent / name).read_bytes()


def test_every_library_is_there_with_its_licence() -> None:
    text = (STATIC.parent / "LICENSES.md").read_text("utf-8")
    package = json.loads((SOURCES / "package.json").read_text("utf-8"))
    for name, version in package["dependencies"].items():
        assert f"## {name} {version}\n" in text, "an exact version, and its licence"
