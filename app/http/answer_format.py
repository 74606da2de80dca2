"""The answer format of a request's path, for what answers before a route does."""

from __future__ import annotations

from starlette.types import Scope

from app.declaration.answers import OPENAI, AnswerFormat

_KEY = "aerie.answer_format"


def attach_format(scope: Scope, answers: AnswerFormat) -> None:
    """Attach the form to a request, for `format_of`."""
    scope[_KEY] = answers


def format_of(scope: Scope) -> AnswerFormat:
    """The form that RequestIdMiddleware attached to this request; OpenAI's before it has."""
    answers: AnswerFormat = scope.get(_KEY, OPENAI)
    return answers
