"""An API is added by one module in app/endpoints, and nothing else is edited."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Iterator
from textwrap import dedent
from typing import Any

import pytest
from fastapi.testclient import TestClient

import app.endpoints
from app.errors import ApiError
from tests.app.fake_engine import ANSWER, CONTEXT, client
from tests.app.keys_file import tenant

PATH = "/v1/summaries"
MODULE = dedent('''
    """Summaries: a text in, fewer words out."""

    import json

    from pydantic import BaseModel

    from app.declaration.answers import AnswerFormat
    from app.declaration.endpoint import Endpoint
    from app.endpoints.chat import ENDPOINTS as CHAT
    from app.validation.field_checks import invalid
    from app.validation.fields import EVERYWHERE, OnlyAt, WithoutEffect


    class SummaryRequest(BaseModel):
        text: str
        words: int = 30
        stream: bool = False


    class SummaryFormat(AnswerFormat):
        id_headers = ("x-summary-id",)
        error_name = "SummaryError"
        error_schema = {"type": "object", "required": ["failed", "field", "id"]}

        def body(self, answer):
            return {"summary": answer.choices[0].message.content}

        def event(self, item, *, null_usage=False):
            return f"event: piece\\n{item}"

        def error_event(self, error, sequence_number=0):
            return f"event: failed\\ndata: {json.dumps({'after': sequence_number})}\\n\\n"

        def error_body(self, error, request_id):
            return {"failed": error.message, "field": error.param, "id": request_id}


    def summarise(chat):
        async def answer(request):
            from app.serving.request_models import ChatRequest

            message = {"role": "user", "content": request.text}
            return await chat.create_chat_completion(
                ChatRequest(
                    messages=[message],
                    max_completion_tokens=request.words,
                    stream=request.stream,
                )
            )

        return answer


    def check(payload, facts):
        if payload.get("text") == "":
            raise invalid("text", "There is nothing to summarise.")


    ENDPOINTS = (
        Endpoint(
            name="summaries",
            path="/v1/summaries",
            prompt="text",
            models=lambda: (SummaryRequest,),
            serving=CHAT[0].serving,
            call=summarise,
            fields={
                **EVERYWHERE,
                "title": WithoutEffect(str, "a text is summarised without it"),
                "language": OnlyAt(("en",), "summaries are in English"),
            },
            check=check,
            generates=True,
            output_limit=("words",),
            answers=SummaryFormat(),
            invocation_field="text",
        ),
    )
''')
LIMIT = 10_000  # tokens a minute
KEYS = tenant("a", "secret", f"tokens_per_minute = {LIMIT}")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One more module in app/endpoints."""
    folder = tmp_path_factory.mktemp("endpoints")
    (folder / "summaries.py").write_text(MODULE, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.endpoints, "__path__", [*app.endpoints.__path__, str(folder)])
        yield
    del sys.modules["app.endpoints.summaries"]
    del app.endpoints.summaries  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def gateway(module: None) -> Iterator[TestClient]:
    """A gateway that was made when the module was there."""
    with client() as made:
        made.app.state.engine._adapter.warm_up()  # type: ignore[attr-defined]
        made.app.state.engine.schemas = made.app.state.engine._adapter.schemas  # type: ignore[attr-defined]
        yield made


def test_without_the_module_there_is_no_such_path() -> None:
    with client() as plain:
        assert plain.post(PATH, json={"text": "a"}).status_code == 404


def test_it_answers(gateway: TestClient) -> None:
    response = gateway.post(PATH, json={"text": "a long text", "title": "A", "language": "en"})
    assert response.json() == {"summary": ANSWER}
    assert response.headers["x-summary-id"] == response.headers["x-request-id"]


def test_it_streams(gateway: TestClient) -> None:
    text = gateway.post(PATH, json={"text": "a long text", "stream": True}).text
    events = [event for event in text.split("\n\n") if event]
    assert len(events) > 3
    assert all(event.startswith("event: piece\ndata: ") for event in events)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"text": "a", "words": "5"}, "words"),
        ({"text": "a", "colour": "red"}, "colour"),
        ({"text": "a", "language": "fr"}, "language"),
        ({"text": "a", "priority": 1}, "priority"),
        ({"text": "a", "speculation": {"k": 1}}, "speculation.k"),
        ({"text": "a", "speculation": {"tokens": True}}, "speculation.tokens"),
        ({"text": "a " * 2 * CONTEXT}, "text"),  # longer than the model's context
    ],
)
def test_it_refuses_in_its_own_words(gateway: TestClient, body: dict[str, Any], field: str) -> None:
    response = gateway.post(PATH, json=body)
    assert response.status_code == 400
    told = response.json()
    assert (told["field"], told["id"]) == (field, response.headers["x-request-id"])


def test_a_body_that_is_no_json_has_its_envelope(gateway: TestClient) -> None:
    response = gateway.post(PATH, content="{", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()) == {"failed", "field", "id"}


def test_an_error_within_a_stream_has_its_form(
    gateway: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = gateway.app.state.engine.llm  # type: ignore[attr-defined]
    whole = llm._outputs

    async def broken(*arguments: Any) -> AsyncGenerator[Any]:
        async for output in whole(*arguments):
            yield output
            raise ApiError(500, "broken")

    monkeypatch.setattr(llm, "_outputs", broken)
    text = gateway.post(PATH, json={"text": "a", "stream": True}).text
    *pieces, failed = [event for event in text.split("\n\n") if event]
    assert pieces
    assert failed.startswith("event: failed\n")


def test_it_is_in_the_documents(gateway: TestClient) -> None:
    from docs.fields import page

    route = gateway.get("/openapi.json").json()["paths"][PATH]["post"]
    schema = route["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) > {"text", "words", "title", "speculation"}
    assert json.dumps(route["responses"]["default"]).endswith('SummaryError"}}}}')
    assert f"## `POST {PATH}`\n\nHonoured: `speculation`, `stream`, `text`, `words`." in page()


def test_sagemaker_comes_to_it_by_its_field_and_by_its_path(gateway: TestClient) -> None:
    for headers in ({}, {"X-Amzn-SageMaker-Custom-Attributes": f"route={PATH}"}):
        response = gateway.post("/invocations", json={"text": "a"}, headers=headers)
        assert response.json() == {"summary": ANSWER}
    refused = gateway.post("/invocations", json={}).json()["error"]["message"]
    assert "'text'" in refused


def test_its_output_is_charged(module: None) -> None:
    """The tokens that may be generated count against the quota: those of the field that names the
    limit, or the request model's default."""
    charged = []
    with client(keys=KEYS) as guarded:
        for limit in ({"words": 500}, {}):
            body = {"text": "a", **limit}
            response = guarded.post(PATH, json=body, headers={"x-api-key": "secret"})
            assert response.status_code == 200, response.text
            charged.append(LIMIT - int(response.headers["x-ratelimit-remaining-tokens"]))
        refused = guarded.post(PATH, json={"text": "a"})
    assert (refused.status_code, set(refused.json())) == (401, {"failed", "field", "id"})
    assert charged[0] > 500
    assert 30 < charged[1] < 500
