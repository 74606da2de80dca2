"""Responses on disk, found by their prompts: added prompts leave the others' responses as they are.

A folder has the responses of one kind, such as one target's greedy ones of up to 256 tokens. Each
file is a table of those that were written together.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from drafters.train.data.token_sequences import Text, Texts

# A prompt, and how often the same one was asked before it.
Asked = tuple[tuple[int, ...], int]


class ResponseCache:
    """The responses in a folder. A prompt that is asked several times has as many responses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: defaultdict[tuple[int, ...], list[Text]] = defaultdict(list)
        # Oldest first: what another run adds meanwhile does not take the place of what was found.
        files = folder.glob("*.safetensors")
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            self._take(Texts.load(file))

    def missing(self, prompts: Iterable[Sequence[int]]) -> list[Asked]:
        """What of `prompts` has no response, in order."""
        return [(key, number) for key, number in _asked(prompts) if number >= len(self._of(key))]

    def add(self, asked: Sequence[Asked], responses: Iterable[Text]) -> None:
        """Keep the responses to a part of what was missing, in any order."""
        texts = Texts.of(responses)
        name = hashlib.sha256(str(asked).encode()).hexdigest()[:32]
        texts.save(self._folder / f"{name}.safetensors")
        self._take(texts)

    def responses(self, prompts: Iterable[Sequence[int]]) -> Iterator[Text]:
        """The response to each prompt, in order. None may be missing."""
        return (self._of(key)[number] for key, number in _asked(prompts))

    def _of(self, key: tuple[int, ...]) -> list[Text]:
        return self._texts.get(key, [])

    def _take(self, texts: Texts) -> None:
        for text in texts:
            self._texts[tuple(text.tokens[: text.prompt].tolist())].append(text)


def _asked(prompts: Iterable[Sequence[int]]) -> Iterator[Asked]:
    counts: Counter[tuple[int, ...]] = Counter()
    for prompt in prompts:
        key = tuple(prompt)
        yield key, counts[key]
        counts[key] += 1
