"""Code to complete: functions that lose their body, and turns that stay unchanged."""

from __future__ import annotations

import pytest

from drafters.train.prompts.sample import Sample
from drafters.train.prompts.selection import FilterBounds, SelectedPrompt, select
from drafters.train.prompts.unfinished import unfinished, unfinished_for_half

ASK = "Complete the following Python function:\n```python\n"


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        # Behind the docstring, and the fence is closed again.
        (f'{ASK}def f(a):\n    """Doc."""\n    return a\n```\nThank you.',
         f'{ASK}def f(a):\n    """Doc."""\n```'),
        # Without a docstring behind the signature.
        (f"{ASK}def f(a):\n    return a\n```", f"{ASK}def f(a):\n```"),
        ("import os\n\n\ndef f(a):\n    return a", "import os\n\n\ndef f(a):"),
        # No colon but the signature's own ends it.
        ("def f(\n    a: int,  # x: y\n    b={1: 2}, c=lambda: 3,\n) -> dict[str, int]:\n    pass",
         "def f(\n    a: int,  # x: y\n    b={1: 2}, c=lambda: 3,\n) -> dict[str, int]:"),
        ("def f(a):  # note:\n\n    # more\n    '''Two\n    lines: here.'''\n    return a",
         "def f(a):  # note:\n\n    # more\n    '''Two\n    lines: here.'''"),
        # A text that is no docstring: it is part of an expression.
        ("def f(a):\n    'x'.join(a)\n", "def f(a):"),
        # The first of two, and a method.
        ("def f():\n    return 1\n\n\ndef g():\n    return 2", "def f():"),
        ("class A:\n    async def f(self):\n        return 1", "class A:\n    async def f(self):"),
        # Only the head has to be Python.
        ("def f(a):\n    return $ 'a", "def f(a):"),
        # Other line ends than Python's are part of a line.
        ("def f(a):\n    '1\u20282\x0c3.'\n    pass", "def f(a):\n    '1\u20282\x0c3.'"),
        # None of these has a head that ends.
        ("What is a def?", None),
        ("def f(a): return a\nif a:\n    pass", None),
        ("def f(a", None),
        ("def f(a)\n    if a:\n        pass", None),
        ('def f(a):\n    """Cut off here', None),
        ("def f(a):\n    'Cut off here", None),
        ("def f(\ud800):\n    pass", None),
    ],
)  # fmt: skip
def test_a_function_ends_behind_its_docstring_or_signature(turn: str, expected: str | None) -> None:
    assert unfinished(turn) == expected


def test_the_text_alone_decides_which_half_is_cut() -> None:
    turns = [f"{ASK}def f{place}(a):\n    return a\n```" for place in range(400)]
    cut = [unfinished_for_half(turn) for turn in turns]
    shorter = sum(a != b for a, b in zip(cut, turns, strict=True))
    assert 150 < shorter < 250
    assert cut == [unfinished_for_half(turn) for turn in turns]


def test_code_to_complete_is_cut_before_duplicates_are_looked_for() -> None:
    """Bodies may make two functions differ whose heads are the same; chat is never cut."""
    heads = "def total(numbers):\n    '''Add all of the numbers up.'''\n    "
    bodies = [f"{heads}return sum{place} * {place} - numbers[{place}]" for place in range(40)]
    bodies += [f"{body}\n    # {body}" for body in bodies]

    def kept(kind: str) -> list[SelectedPrompt]:
        return select(
            [Sample(kind, "def", body, "stop", 9) for body in bodies],
            limits=FilterBounds(similarity=1.0, repeated=1.0),
            count_tokens=lambda texts: [len(text.split()) for text in texts],
            special_tokens=[],
        ).kept

    assert [prompt.text for prompt in kept("chat")] == bodies
    head = heads.rstrip()
    texts = [prompt.text for prompt in kept("complete")]
    assert texts.count(head) == 1
    assert 20 < len(texts) < 60
    assert {*texts} - {head} <= {*bodies}
