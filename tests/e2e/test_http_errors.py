"""Bodies, paths and methods that are no request at all."""

from __future__ import annotations

import time

import httpx
import pytest

from .gateway import MODEL
from .wire import assert_error

CHAT = "/v1/chat/completions"
POSTS = [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/invocations"]
GETS = ["/v1/models", f"/v1/models/{MODEL}", "/metrics", "/livez", "/readyz", "/version"]
JSON_TYPE = {"content-type": "application/json"}
VALID = (
    b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    % MODEL.encode()
)

BODIES: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n",
    "cut": b'{"model": "x"',
    "words": b"hello there",
    "single-quotes": b"{'model': 'x'}",
    "list": b"[]",
    "list-of-requests": b"[" + VALID + b"]",
    "string": b'"hello"',
    "number": b"5",
    "null": b"null",
    "true": b"true",
    "two-values": b"{} {}",
    "trailing-comma": b'{"model": "x",}',
    "not-utf8": b'{"model": "\xff\xfe"}',
    "utf16": '{"model": "x"}'.encode("utf-16"),
    "overlong-utf8": b'{"model": "\xc0\xaf"}',
    "bare-nan": b"NaN",
    "deep-lists": b"[" * 100_000 + b"]" * 100_000,
    "deep-unclosed": b"[" * 100_000,
    "deep-objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep-inside": VALID[:-1] + b', "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "long-number": b'{"model": "x", "seed": ' + b"9" * 100_000 + b"}",
    "form": b"model=x&messages=y",
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(http: httpx.Client, path: str, name: str) -> None:
    assert_error(http.post(path, content=BODIES[name], headers=JSON_TYPE), 400)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", ""]
)
def test_only_json_is_taken(http: httpx.Client, path: str, kind: str) -> None:
    assert_error(http.post(path, content=VALID, headers={"content-type": kind}), 415)


@pytest.mark.parametrize(
    "kind",
    ["application/json; charset=utf-8", "APPLICATION/JSON", "application/json;charset=UTF-8"],
)
def test_json_by_any_spelling_is_taken(http: httpx.Client, kind: str) -> None:
    response = http.post(CHAT, content=VALID, headers={"content-type": kind})
    assert response.status_code == 200, response.text


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
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_the_wrong_method_on_a_post_route(http: httpx.Client, path: str, method: str) -> None:
    response = http.request(method, path)
    assert_error(response, 405)
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_the_wrong_method_on_a_get_route(http: httpx.Client, path: str, method: str) -> None:
    response = http.request(method, path)
    assert_error(response, 405)
    assert "GET" in response.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/page/nope",
        "/nope",
        "/v1",
        "/v1/nope",
        "/v1/chat",
        "/v2/models",
        "/V1/MODELS",
        "/v1/models/a%2Fb",
        "/v1/models/..%2f..%2fmetrics",
        "/v1/chat/completions/extra",
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


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "/v1/models/"])
def test_extra_slashes_lead_to_the_path_that_was_meant(http: httpx.Client, path: str) -> None:
    response = http.get(str(http.base_url).rstrip("/") + path)
    assert (response.status_code, response.headers["location"]) == (307, "/v1/models")
    assert http.get(response.headers["location"]).status_code == 200


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


def test_afterwards_it_serves_as_before(http: httpx.Client) -> None:
    response = http.post(CHAT, content=VALID, headers=JSON_TYPE)
    assert response.status_code == 200, response.text
