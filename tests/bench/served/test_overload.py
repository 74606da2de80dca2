"""`aerie bench overload` against a gateway that runs already."""

from __future__ import annotations

from typing import Any

import pytest

from bench.served import overload
from tests.http_server import Handler, serving

USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 13}}\n\n'
ERROR = b'data: {"error": {"message": "deadline", "code": 503}}\n\n'


def test_its_model_is_asked_with_the_key_and_what_it_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: set[tuple[str, str]] = set()

    class Refusing(Handler):
        def do_GET(self) -> None:
            self.answer(200, b'{"data": [{"id": "org/m"}]}')

        def do_POST(self) -> None:
            asked.add((self.body()["model"], self.headers["Authorization"]))
            self.answer(404, b"{}")

    monkeypatch.setattr(overload, "SETTLE_S", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(Refusing) as url:
        port = url.rpartition(":")[2]
        assert overload.main(["--port", port, "--batch", "1", "--capacity-seconds", "0.2"]) == 1
    assert asked == {("org/m", "Bearer secret")}
    assert "requests had status 404" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "tokens"), [(USAGE, 13), (ERROR, 0)])
async def test_a_stream_that_ends_with_an_error_is_broken(end: bytes, tokens: int) -> None:
    """Catches: no usage is a number of tokens that cannot be read, which ends the bench."""

    class Streaming(Handler):
        def do_POST(self) -> None:
            self.body()
            self.answer(200, b'data: {"choices": [{"text": "a"}]}\n\n' + end + b"data: [DONE]\n\n")

    with serving(Streaming) as url:
        client = overload.OverloadClient(int(url.rpartition(":")[2]), "m", 8, 1)
        await client.ask()
    (outcome,) = client.outcomes
    figures: dict[str, Any] = overload.figures([outcome], outcome.at, outcome.ended + 1.0)
    assert (outcome.tokens, figures["broken"]) == (tokens, int(not tokens))
