"""The wire as a strict client sees it: error envelopes, event streams, metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

JSON = dict[str, Any]
ACTIVE = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HELD = (*ACTIVE, "aerie_gate_running", "aerie_gate_waiting")
GENERATED = "vllm:generation_tokens_total"
# Signs of an internal failure that reached the client instead of an explanation.
LEAKS = (
    *("Traceback", "site-packages", "NoneType", "object is not iterable", ".py:", "0x7f"),
    *("has no attribute", "not subscriptable", "object of type", "unsupported operand"),
    *("unhashable type", "index out of range", "keyword argument", "between instances"),
)


def describe(response: httpx.Response) -> str:
    request = response.request
    sent = request.content[:300].decode(errors="replace") if hasattr(request, "_content") else "..."
    answer = f"{response.status_code} {response.text[:400]}"
    return f"{request.method} {request.url.path} {sent} -> {answer}"


def assert_names(error: JSON, field: str) -> None:
    """The error is about the field or something inside it."""
    param = error["param"]
    assert param is not None, f"no param, wanted {field}: {error['message']}"
    inside = param.startswith((f"{field}.", f"{field}["))
    assert param == field or inside, f"{param!r} is not {field}: {error}"


def assert_error(
    response: httpx.Response,
    status: int | Collection[int],
    *,
    param: str | Collection[str | None] | None = "any",
    code: str | None = "any",
    kind: str | None = None,
) -> JSON:
    """OpenAI's one error envelope; `param` may be a set of equally good names."""
    allowed = {status} if isinstance(status, int) else set(status)
    where = describe(response)
    assert response.status_code in allowed, f"wanted {sorted(allowed)}: {where}"
    assert response.headers["content-type"].startswith("application/json"), where
    body = response.json()
    assert set(body) == {"error"}, where
    error = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}, where
    assert isinstance(error["message"], str), where
    assert error["message"].strip(), where
    assert len(error["message"]) < 4000, f"the message echoes the input: {where}"
    assert not [leak for leak in LEAKS if leak in error["message"]], where
    assert error["param"] is None or isinstance(error["param"], str), where
    assert error["code"] is None or isinstance(error["code"], str), where
    expected = kind or ("server_error" if response.status_code >= 500 else "invalid_request_error")
    assert error["type"] == expected, f"wanted type {expected}: {where}"
    if param != "any":
        names = {param} if param is None or isinstance(param, str) else set(param)
        assert error["param"] in names, f"wanted param {names}: {where}"
    if code != "any":
        assert error["code"] == code, f"wanted code {code}: {where}"
    return dict(error)


def assert_anthropic_error(
    response: httpx.Response, status: int | Collection[int], kind: str
) -> JSON:
    allowed = {status} if isinstance(status, int) else set(status)
    where = describe(response)
    assert response.status_code in allowed, f"wanted {sorted(allowed)}: {where}"
    assert response.headers["content-type"].startswith("application/json"), where
    body = response.json()
    assert body.get("type") == "error", where
    assert isinstance(body.get("error"), dict), where
    assert body["error"].get("type") == kind, f"wanted {kind}: {where}"
    message = body["error"].get("message")
    assert isinstance(message, str), where
    assert message.strip(), where
    assert not [leak for leak in LEAKS if leak in message], where
    return dict(body["error"])


@dataclass(frozen=True)
class Event:
    name: str | None
    data: str
    at_s: float


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Server-sent events, refusing anything but `event:`, `data:`, comments and blank lines."""
    start = time.monotonic()
    name: str | None = None
    data: list[str] = []
    for line in lines:
        if line == "":
            if data:
                yield Event(name, "\n".join(data), time.monotonic() - start)
            name, data = None, []
        elif line.startswith(":"):
            continue
        else:
            key, separator, value = line.partition(": ")
            assert separator, f"not a server-sent event line: {line!r}"
            assert key in {"event", "data"}, f"an event has no such field: {line!r}"
            if key == "event":
                name = value
            else:
                data.append(value)
    assert not data, "the stream ended inside an event"


def stream(http: httpx.Client, path: str, body: JSON) -> list[Event]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(read_events(response.iter_lines()))


def chunks(events: list[Event]) -> list[JSON]:
    """OpenAI's chunked routes: unnamed events of JSON, `[DONE]` once and last, no error frame."""
    assert [e.data for e in events].count("[DONE]") == 1, events[-2:]
    assert events[-1].data == "[DONE]", events[-2:]
    assert all(e.name is None for e in events)
    parsed: list[JSON] = [json.loads(e.data) for e in events[:-1]]
    assert not [c for c in parsed if "error" in c], [c for c in parsed if "error" in c]
    return parsed


def post_chunks(http: httpx.Client, path: str, body: JSON) -> list[JSON]:
    return chunks(stream(http, path, body))


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric over all its labels but the given ones."""
    response = http.get("/metrics")
    assert response.status_code == 200
    values = [
        sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert values, f"/metrics has no {name}"
    return sum(values)


def wait_for_metric(
    http: httpx.Client, names: Collection[str], value: float, timeout_s: float
) -> float:
    """Poll until the named metrics' sum is `value`; returns the seconds that took. What was read
    before `timeout_s` had passed fails nobody: one answer may take as long as that."""
    start = time.monotonic()
    while True:
        begun = time.monotonic() - start
        if (now := sum(metric(http, n) for n in names)) == value:
            return time.monotonic() - start
        assert begun < timeout_s, f"{'+'.join(names)} is {now}, not {value}, after {begun:.1f} s"
        time.sleep(0.05)


def text_of(body: JSON) -> str:
    """The text of the first choice, whatever the route."""
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])
