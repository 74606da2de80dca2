"""Bodies, paths and methods that are no request at all, as a real server parses them. The rest is
in tests/app/http."""

from __future__ import annotations

import time

import httpx
import pytest

from .gateway import MODEL
from .wire import assert_error

CHAT = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}
VALID = (
    b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    % MODEL.encode()
)

DEEP = VALID[:-1] + b', "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_a_body_nested_too_deeply(http: httpx.Client) -> None:
    assert_error(http.post(CHAT, content=DEEP, headers=JSON_TYPE), 400)


@pytest.mark.parametrize("chunked", [False, True], ids=["with-length", "chunked"])
def test_a_huge_body_is_refused_at_once(http: httpx.Client, chunked: bool) -> None:
    body = VALID[:-1] + b', "user": "' + b"x" * (20 * 2**20) + b'"}'
    started = time.monotonic()
    try:
        content = (body[i : i + 2**16] for i in range(0, len(body), 2**16)) if chunked else body
        response = http.post(CHAT, content=content, headers=JSON_TYPE)
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError) as error:
        pytest.fail(f"cut off without an answer: {error!r}")
    assert_error(response, {400, 413})
    assert time.monotonic() - started < 20, "nor when its time was over"


@pytest.mark.parametrize(
    "path",
    [
        "/page/nope",
        "/v1/models/a%2Fb",
        "/v1/models/..%2f..%2fmetrics",
        "/%00",
        "/%ff",
        "/v1/models/%0d%0aX-Injected:%20yes",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_paths_that_do_not_exist(http: httpx.Client, path: str, method: str) -> None:
    # An absolute address, since a client reads "//v1" alone as a host.
    response = http.request(method, str(http.base_url).rstrip("/") + path)
    if method == "POST" and path.startswith("/v1/models/"):
        assert_error(response, {404, 405})
    else:
        assert_error(response, 404)
    assert "x-injected" not in response.headers


@pytest.mark.parametrize("path", ["/v1%2Fmodels", "/v1/chat%2Fcompletions"])
def test_an_encoded_slash_is_one_slash_or_none(http: httpx.Client, path: str) -> None:
    """Servers decode paths before they route: both readings are fine, a failure is not."""
    for method in ("GET", "POST"):
        response = http.request(method, path)
        if response.status_code != 200:
            assert_error(response, {400, 404, 405, 415})


def test_an_error_leaves_the_connection_usable(http: httpx.Client) -> None:
    for _ in range(3):
        assert_error(http.post(CHAT, content=b"{", headers=JSON_TYPE), 400)
        assert http.get("/livez").status_code == 200
