"""Questions over a quoted text, to be answered by quotation: pages of the Python reference.

The texts are those that `help()` prints, which the standard library carries (`pydoc_data`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics

from bench.workloads.prompt import Prompt

SHORTEST, LONGEST = 800, 1800  # characters of a text, about 180 to 400 tokens
_PARAGRAPH = 120  # characters of a paragraph, at least: headings and lists are shorter
_EVERY = 12  # of so many words one gets a spelling mistake
_REQUESTS = (
    "Repeat the text word for word.",
    "The text has spelling mistakes. Write it again without them and change nothing else.",
    "List the sentences of the text, each in a line of its own behind a dash, unchanged.",
    "Which sentences of the text mention `{word}`? Quote them word for word.",
    "What does the text say about `{word}`? Answer with quotations from it.",
)


def quoted_texts() -> list[Prompt]:
    """A prompt for each text; the five kinds of question take turns."""
    prompts = []
    for number, text in enumerate(texts()):
        request = _REQUESTS[number % len(_REQUESTS)].format(word=frequent_word(text))
        quoted = misspelt(text) if "mistakes" in request else text
        content = f"{request}\n\n{quoted}"
        prompts.append(Prompt(messages=({"role": "user", "content": content},)))
    return prompts


def texts() -> list[str]:
    """Neighbouring paragraphs of one page, of SHORTEST to LONGEST characters together."""
    found = []
    for page in dict.fromkeys(topics[name] for name in sorted(topics)):
        text = ""
        for paragraph in _paragraphs(page):
            text = f"{text}\n\n{paragraph}" if text else paragraph
            if len(text) >= SHORTEST:
                if len(text) <= LONGEST:
                    found.append(text)
                text = ""
    return found


def _paragraphs(page: str) -> Iterator[str]:
    """The paragraphs of prose in a page: no headings, lists, grammar or code."""
    for block in page.split("\n\n"):
        paragraph = " ".join(block.split())
        prose = not block.startswith(" ") and "::=" not in block and paragraph.endswith(".")
        if prose and len(paragraph) >= _PARAGRAPH:
            yield paragraph


def frequent_word(text: str) -> str:
    """The word of six letters or more that is most frequent in a text; the first of several."""
    words = Counter(re.findall(r"\b[a-z]{6,}\b", text))
    return words.most_common(1)[0][0] if words else text.split()[0]


def misspelt(text: str) -> str:
    """A text in which two neighbouring letters of one word in twelve have changed places."""
    words = text.split(" ")
    for place in range(_EVERY // 2, len(words), _EVERY):
        word = words[place]
        if len(word) > 4 and word.isalpha():
            words[place] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)
