"""/v1/responses between requests: what is kept, and what a later request makes of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx import ASGITransport, AsyncClient

from app.admission.key_file import create
from app.engine.supervisor import Phase
from app.errors import ApiError
from app.llm.first_token import FirstToken
from app.main import create_app
from app.routes import stored_responses
from app.routes.response_store import ResponseStore, StoredItem
from app.routes.stored_responses import Turn
from app.serving.operation import Reply
from app.settings import load
from app.validation.output_limit import OutputLimit
from tests.app.phased_engine import PhasedEngine
from tests.waiting import soon

PATH = "/v1/responses"
JSON = dict[str, Any]


class EchoOperation:
    """Answers with the texts of the input; keeps the payloads that it was asked with."""

    output_limit = OutputLimit()

    def __init__(self) -> None:
        self.payloads: list[JSON] = []
        self.text = ""
        self.values = 0
        self.logprobs: list[JSON] = []
        self.told: JSON = {}  # other fields of the response
        self._numbers = itertools.count(1)

    async def __call__(self, payload: JSON, size: int = 0) -> Reply:
        self.payloads.append(payload)
        number = next(self._numbers)
        text = self.text or f"answer {number}"
        part: JSON = {"type": "output_text", "text": text, "annotations": [{}] * self.values}
        content = [part | ({"logprobs": self.logprobs} if self.logprobs else {})]
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content}
        response = {"id": f"resp_{number}", "status": "completed", "output": [item], **self.told}
        first = FirstToken(settled=True)
        return Reply(self.events(response) if payload.get("stream") else response, first)

    def event(self, error: ApiError, sequence_number: int) -> str:
        raise AssertionError("no deadline passes here")

    async def events(self, response: JSON) -> AsyncGenerator[str, None]:
        for kind, changes in (
            ("response.created", {"status": "in_progress", "output": []}),
            ("response.output_text.delta", None),
            ("response.completed", {}),
        ):
            data: JSON = {"type": kind}
            if changes is not None:
                data["response"] = {**response, **changes}
            yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"


class EchoEngine(PhasedEngine):
    """Ready at once."""

    echo: EchoOperation

    def operation(self, name: str) -> Any:
        return self.echo


class CountedJson:
    """Stands for the module in app.routes.stored_responses: notes what is parsed, and where."""

    dumps = staticmethod(json.dumps)

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.threads: set[str] = set()

    def loads(self, text: bytes) -> Any:
        self.texts.append(text)
        self.threads.add(threading.current_thread().name)
        return json.loads(text)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> CountedJson:
    counted = CountedJson()
    monkeypatch.setattr(stored_responses, "json", counted)
    return counted


def made(**options: str) -> tuple[TestClient, EchoOperation]:
    settings = load(options, {}, preset="embedded")
    engine = EchoEngine(settings)
    engine.echo = EchoOperation()
    return TestClient(create_app(settings, engine)), engine.echo


@pytest.fixture
def served() -> Iterator[tuple[TestClient, EchoOperation]]:
    client, echo = made()
    with client:
        yield client, echo


Served = tuple[TestClient, EchoOperation]


def ask(client: TestClient, **body: Any) -> JSON:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: JSON = response.json()
    return answer


def streamed(client: TestClient, **body: Any) -> list[JSON]:
    text = client.post(PATH, json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def texts(payload: JSON) -> list[str]:
    found = []
    for item in payload["input"]:
        content = item["content"]
        found.append(content if isinstance(content, str) else content[0]["text"])
    return found


def input_text(text: str) -> JSON:
    return {"type": "input_text", "text": text}


def test_a_conversation_goes_on_by_id(served: Served) -> None:
    client, echo = served
    first = ask(client, input="one")
    assert (first["store"], first["previous_response_id"]) == (True, None)
    second = ask(client, input="two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    ask(client, input=[{"role": "user", "content": "three"}], previous_response_id=second["id"])
    assert texts(echo.payloads[-1]) == ["one", "answer 1", "two", "answer 2", "three"]
    assert echo.payloads[-1]["previous_response_id"] is None
    again = ask(client, input="other", previous_response_id=first["id"])  # a branch
    assert texts(echo.payloads[-1]) == ["one", "answer 1", "other"]
    assert again["previous_response_id"] == first["id"]


def test_a_turn_without_input_is_left_to_the_checks(served: Served) -> None:
    client, echo = served
    first = ask(client, input="one")
    ask(client, previous_response_id=first["id"])
    assert "input" not in echo.payloads[-1]


def test_instructions_are_those_of_the_request(served: Served) -> None:
    client, echo = served
    first = ask(client, input="one", instructions="Be brief.")
    ask(client, input="two", previous_response_id=first["id"])
    assert "instructions" not in echo.payloads[-1]


def test_a_streamed_response_is_kept_too(served: Served) -> None:
    client, echo = served
    events = streamed(client, input="one")
    assert [event["type"] for event in events][1] == "response.output_text.delta"
    assert all(event["response"]["store"] for event in events if "response" in event)
    last = events[-1]["response"]
    more = streamed(client, input="two", previous_response_id=last["id"])
    assert texts(echo.payloads[-1]) == ["one", "answer 1", "two"]
    assert more[0]["response"]["previous_response_id"] == last["id"]
    assert client.get(f"{PATH}/{last['id']}").json() == last


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_response_says_the_format_that_was_asked_for(served: Served, forgotten: bool) -> None:
    """Catches: plain text, as which vLLM's answer has a schema that it enforced beside tools."""
    client, echo = served
    kind = {"type": "json_schema", "name": "f", "schema": {"type": "object", "properties": {}}}
    echo.told = {"text": {"format": {"type": "text"} if forgotten else kind}}
    assert ask(client, input="one", text={"format": kind})["text"] == {"format": kind}
    for event in streamed(client, input="one", text={"format": kind, "verbosity": "low"}):
        if "response" in event:
            assert event["response"]["text"] == {"format": kind, "verbosity": "low"}
    for name in ("text", "json_schema"):  # vLLM's own schema of forced calls, say
        echo.told = {"text": {"format": {**kind, "type": name}}}
        for sent in ({}, {"text": None}):
            assert ask(client, input="one", **sent)["text"] == {"format": {"type": "text"}}


def test_items_are_referred_to_by_id(served: Served) -> None:
    client, echo = served
    answer = ask(client, input="one")
    item = answer["output"][0]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        ask(client, input=[{"role": "user", "content": "one"}, reference])
        assert echo.payloads[-1]["input"][1] == item


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_missing_item_is_named_by_its_place_in_what_was_sent(
    served: Served, before: int, by_id: bool
) -> None:
    """Items before it that are found, and turns that an id brings, do not move it."""
    client, _ = served
    answer = ask(client, input=[{"role": "user", "content": "one"}] * 5)
    body: JSON = {"previous_response_id": answer["id"]} if by_id else {}
    body["input"] = [{"id": answer["output"][0]["id"]}] * before + [{"id": "msg_0"}]
    error = client.post(PATH, json=body).json()["error"]
    assert error["param"] == f"input[{before}].id"
    assert error["code"] == "previous_item_not_found"


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "item_reference"}])
@pytest.mark.parametrize("item_id", [[], {"a": 1}, 0, 0.5, False])
def test_the_id_of_an_item_that_is_referred_to_is_a_text(
    served: Served, item_id: Any, kind: JSON, by_id: bool
) -> None:
    client, _ = served
    body = {"previous_response_id": ask(client, input="one")["id"]} if by_id else {}
    items = [{"role": "user", "content": "hi", "id": item_id}, {**kind, "id": item_id}]
    response = client.post(PATH, json={"input": items, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input[1].id")
    assert "string" in error["message"]


@pytest.mark.parametrize("changes", [{}, {"id": None}, {"role": None}])
def test_a_reference_needs_an_id(served: Served, changes: JSON) -> None:
    client, _ = served
    items = [{"type": "item_reference", **changes}]
    error = client.post(PATH, json={"input": items}).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].id", "missing_parameter")


def test_a_null_role_is_none(served: Served) -> None:
    client, echo = served
    item = ask(client, input="one")["output"][0]
    ask(client, input=[{"id": item["id"], "role": None}])
    assert echo.payloads[-1]["input"] == [item]


def test_an_item_is_parsed_once_however_often_it_is_referred_to(
    served: Served, parsed: CountedJson
) -> None:
    client, echo = served
    answers = [ask(client, input="a long question " * 1000) for _ in range(3)]
    items = [answer["output"][0] for answer in answers]
    references = [{"id": item["id"]} for item in items] * 300
    ask(client, input=[{"role": "user", "content": "hi"}, *references])
    assert echo.payloads[-1]["input"][1:] == items * 300
    assert len(parsed.texts) <= len(answers)
    assert parsed.threads == {"aerie-body_0"}, "it is large enough to hold up the event loop"


def test_too_many_items_are_refused_before_anything_is_looked_up(
    served: Served, parsed: CountedJson
) -> None:
    client, _ = served
    first = ask(client, input="one")
    reference = {"id": first["output"][0]["id"]}
    for body, count in (
        ({"input": [reference] * 30_000}, 30_000),
        ({"input": [{"id": 5}] * 1025}, 1025),
        ({"input": [reference] * 1023, "previous_response_id": first["id"]}, 1025),
    ):
        error = client.post(PATH, json=body).json()["error"]
        assert error["param"] == "input"
        assert "1024 items" in error["message"] and str(count) in error["message"]
    assert parsed.texts == []
    ask(client, input=[reference] * 1022, previous_response_id=first["id"])


@pytest.mark.parametrize("by_id", [False, True])
def test_what_is_referred_to_shares_the_bound_of_all_bodies(
    parsed: CountedJson, by_id: bool
) -> None:
    """It is as large as if it had been sent, and is refused before it is parsed."""
    client, echo = made(max_bodies_mib="0.05")
    with client:
        echo.text = "x" * 40_000
        answer = ask(client, input="one")
        item = {"id": answer["output"][0]["id"]}
        one: JSON = {"input": [item]}
        two: JSON = {"input": [item] * 2}
        if by_id:
            one, two = {"previous_response_id": answer["id"], "input": "go"}, {**one, **two}
            two["previous_response_id"] = answer["id"]
        ask(client, **one, store=False)
        parsed.texts.clear()
        refused = client.post(PATH, json=two)
        assert (refused.status_code, parsed.texts) == (429, [])
        assert refused.json()["error"]["code"] == "server_overloaded"
        assert client.app.state.admission.body_bytes == 0  # type: ignore[attr-defined]
        ask(client, **one, store=False)


def test_repeated_references_are_bounded_by_what_a_tenant_may_keep(parsed: CountedJson) -> None:
    """Every response that is kept can be referred to, once."""
    client, echo = made(stored_responses_mib="0.2")
    with client:
        echo.text = "x" * 40_000
        items = [ask(client, input="one")["output"][0]["id"] for _ in range(2)]
        body: JSON = {"input": [{"id": item} for item in items], "store": False}
        ask(client, **body)
        parsed.texts.clear()
        refused = client.post(PATH, json={**body, "input": body["input"] * 3})
        assert (refused.status_code, parsed.texts) == (413, [])
        assert refused.json()["error"]["param"] == "input"


@pytest.mark.parametrize("by_id", [False, True])
def test_what_is_referred_to_holds_no_more_values_than_a_body(
    parsed: CountedJson, by_id: bool
) -> None:
    """Parsing takes memory and time for each of them, whatever their bytes."""
    client, echo = made(max_body_values="400")
    with client:
        if by_id:
            item = {"role": "user", "content": "x", "logprobs": [{}] * 100}
            first = ask(client, input=[item])
            second = ask(client, input=[item], previous_response_id=first["id"])
            body: JSON = {"input": "go on", "previous_response_id": second["id"]}
        else:
            echo.values = 100
            reference = {"id": ask(client, input="one")["output"][0]["id"]}
            ask(client, input=[reference], store=False)
            body = {"input": [reference] * 2}
        parsed.texts.clear()
        refused = client.post(PATH, json=body)
        assert (refused.status_code, parsed.texts) == (400, [])
        param = "previous_response_id" if by_id else "input"
        assert refused.json()["error"]["param"] == param


def test_logprobs_are_read_with_a_response_and_not_in_later_turns(served: Served) -> None:
    client, echo = served
    echo.logprobs = [{"token": "a", "logprob": -0.5, "top_logprobs": []}] * 40_000
    answer = ask(client, input="one")
    assert client.get(f"{PATH}/{answer['id']}").json() == answer
    assert answer["output"][0]["content"][0]["logprobs"] == echo.logprobs
    echo.logprobs = []
    for _ in range(3):
        answer = ask(client, input="more", previous_response_id=answer["id"])
    ask(client, input=[{"id": "msg_1"}])
    assert "logprobs" not in json.dumps(echo.payloads[-2:])


@pytest.mark.parametrize("wrong", [5, {"role": "user", "content": "x"}, True])
def test_an_input_of_a_wrong_type_is_left_to_the_checks(served: Served, wrong: Any) -> None:
    client, echo = served
    first = ask(client, input="one")
    ask(client, input=wrong, previous_response_id=first["id"], store=False)
    assert echo.payloads[-1]["input"] == wrong


def test_a_previous_response_of_a_wrong_type_is_left_to_the_checks(served: Served) -> None:
    client, echo = served
    item = ask(client, input="one")["output"][0]
    ask(client, input=[{"id": item["id"]}], previous_response_id=5)
    assert echo.payloads[-1] == {"input": [item], "previous_response_id": 5}


def test_a_kept_response_is_read_without_being_parsed(served: Served, parsed: CountedJson) -> None:
    client, _ = served
    item = {"type": "message", "role": "user", "content": [input_text("one")], "id": "msg_a"}
    first = ask(client, input=[item])
    where = f"{PATH}/{first['id']}"
    assert client.get(where).json() == first
    page = client.get(f"{where}/input_items").json()
    ends = {"first_id": "msg_a", "last_id": "msg_a"}
    assert page == {"object": "list", "data": [item], "has_more": False, **ends}
    assert parsed.texts == []


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_not_kept_is_refused_by_name(served: Served, streaming: bool) -> None:
    client, _ = served
    unkept = ask(client, input="one", store=False)
    assert unkept["store"] is False
    for changes, param, code in (
        ({"previous_response_id": unkept["id"]}, "previous_response_id", "response"),
        ({"input": [{"id": "msg_9"}]}, "input[0].id", "item"),
    ):
        response = client.post(PATH, json={"input": "two", "stream": streaming, **changes})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert error["code"] == f"previous_{code}_not_found"
        assert "3600 s" in error["message"]


def test_a_response_is_read_and_deleted(served: Served) -> None:
    client, _ = served
    first = ask(client, input="one")
    second = ask(client, input="two", previous_response_id=first["id"])
    where = f"{PATH}/{second['id']}"
    assert client.get(where).json() == second
    listed = client.get(f"{where}/input_items?order=asc").json()
    assert texts({"input": listed["data"]}) == ["one", "answer 1", "two"]
    assert client.delete(where).json() == {
        "id": second["id"],
        "object": "response",
        "deleted": True,
    }
    for method in ("GET", "DELETE"):
        gone = client.request(method, where)
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "response_id")
    assert client.get(f"{PATH}/{first['id']}").status_code == 200


def test_input_items_come_in_pages(served: Served) -> None:
    client, _ = served
    items = [{"role": "user", "content": str(number)} for number in range(45)]
    items[7]["id"] = "msg_seven"
    where = f"{PATH}/{ask(client, input=items)['id']}/input_items"

    def page(**query: Any) -> tuple[list[int], dict[str, Any]]:
        listed = client.get(where, params=query).json()
        ids = [item["id"] for item in listed["data"]]
        if ids:
            assert (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
        return [int(text) for text in texts({"input": listed["data"]})], listed

    newest, first = page()
    assert (newest, first["has_more"]) == (list(range(44, 24, -1)), True)
    middle, second = page(after=first["last_id"])
    assert (middle, second["has_more"]) == (list(range(24, 4, -1)), True)
    oldest, third = page(after=second["last_id"])
    assert (oldest, third["has_more"]) == (list(range(4, -1, -1)), False)
    assert page(after=third["last_id"])[0] == []
    assert page(order="asc", limit=3, after="msg_seven")[0] == [8, 9, 10]
    every, whole = page(order="asc", limit=100)
    assert (every, whole["has_more"]) == (list(range(45)), False)
    assert page(limit=45)[1]["has_more"] is False
    assert page(limit=44)[1]["has_more"] is True


def test_the_end_of_a_large_stream_is_rewritten_beside_the_event_loop(
    served: Served, parsed: CountedJson
) -> None:
    client, echo = served
    streamed(client, input="one")
    assert "aerie-body_0" not in parsed.threads
    echo.text = "x" * 10_000
    streamed(client, input="one")
    assert "aerie-body_0" in parsed.threads


def test_a_page_shares_the_bound_of_all_bodies(served: Served, parsed: CountedJson) -> None:
    """Catches: a copy for each reader beyond any bound; one that is made on the event loop."""
    client, _ = served
    item = {"role": "user", "content": "x" * 10_000, "id": "msg_same"}
    where = f"{PATH}/{ask(client, input=[item, item])['id']}/input_items"
    admission = client.app.state.admission  # type: ignore[attr-defined]
    admission.body_bytes = admission.max_body_bytes - 20_000
    refused = client.get(where)
    assert (refused.status_code, parsed.texts) == (429, [])
    assert refused.json()["error"]["code"] == "server_overloaded"
    assert admission.body_bytes == admission.max_body_bytes - 20_000, "nothing stays taken"
    admission.body_bytes = 0
    assert len(client.get(where).json()["data"]) == 2
    assert parsed.threads == {"aerie-body_0"}


async def test_a_response_that_is_told_as_failed_is_not_kept() -> None:
    """A deadline may pass while the last event waits for a reader: it was kept as completed."""
    _, echo = made()
    store = ResponseStore(2**20, 3600)
    turn = Turn(store, "one", {"input": "x"}, 10, None, True)
    async for _ in turn.stream(echo.events({"id": "resp_1", "status": "completed", "output": []})):
        pass
    assert store.get("one", "resp_1") is not None
    data = json.dumps({"type": "error", "message": "late", "sequence_number": 2})
    events = turn.failed(f"event: error\ndata: {data}\n\n")
    assert '"status": "failed"' in events
    assert store.get("one", "resp_1") is None


async def test_a_page_counts_until_its_reader_has_it() -> None:
    """The fault: bytes were given back while they waited in a connection that is read slowly."""
    client, _ = made()
    app: Any = client.app
    app.state.engine.phase = Phase.READY
    text = "x" * 300_000
    async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as asking:
        answer = await asking.post(PATH, json={"input": text})
    path = f"{PATH}/{answer.json()['id']}/input_items"
    reads, parts = asyncio.Event(), list[bytes]()

    async def receive() -> JSON:
        await asyncio.Event().wait()
        return {}

    async def send(message: JSON) -> None:
        if parts:
            await reads.wait()
        if message["type"] == "http.response.body":
            parts.append(bytes(message["body"]))

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": b"", "query_string": b"",
        "http_version": "1.1", "scheme": "http", "server": ("t", 1), "root_path": "",
        "headers": [],
    }  # fmt: skip
    answering = asyncio.create_task(app(scope, receive, send))
    await soon(lambda: parts)
    assert app.state.admission.body_bytes >= len(text)
    reads.set()
    await answering
    assert app.state.admission.body_bytes == 0
    assert max(map(len, parts)) <= stored_responses.PART_BYTES
    (item,) = json.loads(b"".join(parts))["data"]
    assert item["content"] == [input_text(text)]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_end_where_items_share_an_id(served: Served, order: str) -> None:
    """As the official clients read them: each page begins after the last item of the one before."""
    client, _ = served
    said = ["one", "two", "three", "four", "five"]
    items = [{"role": "user", "content": text, "id": "msg_same"} for text in said]
    where = f"{PATH}/{ask(client, input=items)['id']}/input_items"
    listed: list[JSON] = []
    for _ in items:
        query = {"order": order, "limit": "2"} | ({"after": listed[-1]["id"]} if listed else {})
        page = client.get(where, params=query).json()
        listed += page["data"]
        if not page["has_more"]:
            break
    assert texts({"input": listed}) == (said if order == "asc" else said[::-1])
    assert len({item["id"] for item in listed}) == len(items)
    assert listed[0 if order == "asc" else -1]["id"] == "msg_same"


def test_messages_are_listed_in_the_form_of_openais_api(served: Served) -> None:
    """Clients read `item.content[0].text`, and tell items apart by their type."""
    client, _ = served
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}
    said = {"type": "message", "role": "user", "content": [input_text("three")], "id": "msg_3"}
    items = [
        {"role": "system", "content": "one", "id": "msg_1"},
        {"role": "assistant", "content": "two", "id": "msg_2"},
        call,
        said,
    ]
    where = f"{PATH}/{ask(client, input=items)['id']}/input_items"
    listed = client.get(where, params={"order": "asc"}).json()["data"]
    system = {"type": "message", "role": "system", "content": [input_text("one")], "id": "msg_1"}
    text = {"type": "output_text", "text": "two", "annotations": []}
    output = {"type": "message", "role": "assistant", "content": [text], "id": "msg_2"}
    assert listed == [system, output, call, said]
    (only,) = client.get(f"{PATH}/{ask(client, input='hi')['id']}/input_items").json()["data"]
    assert (only["type"], only["content"]) == ("message", [input_text("hi")])


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "true"}, "stream"),
        ({"stream": "1"}, "stream"),
        ({"starting_after": "3"}, "starting_after"),
        ({"stream": "false"}, None),
        ({}, None),
    ],
)
def test_a_kept_response_is_no_stream(
    served: Served, query: dict[str, str], param: str | None
) -> None:
    """Catches: a whole answer, in which the official client's stream finds no event."""
    client, _ = served
    response = client.get(f"{PATH}/{ask(client, input='one')['id']}", params=query)
    found = response.json()["error"] if response.status_code == 400 else {}
    assert (response.status_code, found.get("param")) == (400 if param else 200, param)


def test_only_the_items_of_a_page_are_copied(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a page of 2 items that wrote each of a long conversation anew, for its id."""
    client, _ = served
    items = [{"role": "user", "content": str(number)} for number in range(45)]
    where = f"{PATH}/{ask(client, input=items)['id']}/input_items"
    made: list[str | None] = []

    def make(item_id: str | None, data: bytes) -> StoredItem:
        made.append(item_id)
        return StoredItem(item_id, data)

    monkeypatch.setattr(stored_responses, "StoredItem", make)
    listed = client.get(where, params={"limit": 2}).json()
    assert made == [item["id"] for item in listed["data"]]
    assert len(made) == 2


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *(
            ({"limit": limit}, "limit")
            for limit in ("0", "101", "0101", "-1", "x", "1.5", "9" * 5000, "")
        ),
        ({"order": "up"}, "order"),
        ({"after": "msg_of_another"}, "after"),
    ],
)
def test_a_page_that_cannot_be_is_refused(
    served: Served, query: dict[str, str], param: str
) -> None:
    client, _ = served
    response = client.get(f"{PATH}/{ask(client, input='one')['id']}/input_items", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_server_that_keeps_nothing_says_so() -> None:
    client, _ = made(stored_responses_mib="0")
    with client:
        answer = ask(client, input="one", store=True)
        assert answer["store"] is False
        events = streamed(client, input="x")
        assert not any(event["response"]["store"] for event in events if "response" in event)
        refused = client.post(PATH, json={"input": "x", "previous_response_id": answer["id"]})
        assert refused.status_code == 400
        assert "keeps no responses" in refused.json()["error"]["message"]


def test_a_conversation_that_is_too_large_is_not_kept() -> None:
    client, _ = made(stored_responses_mib="0.001")
    with client:
        assert ask(client, input="x" * 2000)["store"] is False
        assert ask(client, input="x")["store"] is True


def test_tenants_do_not_see_each_others_responses(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.toml"
    keys = {
        name: create(keys_file, name, {}, admin=False, now=datetime.now(UTC))[1]
        for name in ("one", "other")
    }
    headers = {name: {"authorization": f"Bearer {key}"} for name, key in keys.items()}
    client, _ = made(keys_file=str(keys_file))
    with client:
        made_by_one = client.post(PATH, json={"input": "x"}, headers=headers["one"]).json()
        where = f"{PATH}/{made_by_one['id']}"
        assert client.get(where, headers=headers["one"]).status_code == 200
        assert client.get(where, headers=headers["other"]).status_code == 404
        assert client.delete(where, headers=headers["other"]).status_code == 404
        body = {"input": "y", "previous_response_id": made_by_one["id"]}
        assert client.post(PATH, json=body, headers=headers["other"]).status_code == 400
        assert client.get(where).status_code == 401
