"""A chat template that fails for every request is the server's fault, and start-up says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

USER = {"role": "user", "content": "hi"}
BROKEN = {
    "undefined": "{{ messages.nothing.at_all }}",
    "raised": "{{ raise_exception('never') }}",
}
WORKS = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Fails for what some requests bring, and works for a plain user message.
PARTLY = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}" + WORKS
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"messages": [USER]}),
]


def served(gateway: Any, folder: Path, template: str) -> Any:
    file = folder / "template.jinja"
    file.write_text(template)
    client = gateway(chat_template=str(file))
    client.app.state.engine._adapter.warm_up()
    return client


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_always_fails(
    gateway: Any, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="app.serving.adapter"):
        client = served(gateway, tmp_path, BROKEN[kind])
    assert "chat template fails for a plain user message" in caplog.text
    for path, body in CHATS:
        answer = client.post(path, json={"model": "fake", **body})
        assert answer.status_code == 500, (path, answer.text)
        assert "chat template fails" in answer.text
        assert "never" not in answer.text
    text = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
    assert text.status_code == 200


def test_a_template_that_refuses_some_requests(
    gateway: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="app.serving.adapter"):
        client = served(gateway, tmp_path, PARTLY)
    assert caplog.text == ""
    good = client.post("/v1/chat/completions", json={"messages": [USER]})
    assert good.status_code == 200
    bad = client.post("/v1/chat/completions", json={"messages": [USER, USER]})
    assert bad.status_code == 400
    assert "one message" in bad.json()["error"]["message"]
