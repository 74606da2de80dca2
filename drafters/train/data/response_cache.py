"""Responses on disk, found by their prompts: added prompts leave the others' responses as they are.

A folder has the responses of one kind, such as one target's greedy ones of up to 256 tokens. Each
file is a table of those that were written together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from drafters.train.data.token_sequences import Text, Texts


class NumberedPrompt(NamedTuple):
    """A prompt among others."""

    prompt: Sequence[int]  # token ids
    repetition: int  # how often the same prompt comes before it

    @property
    def digest(self) -> bytes:
        """sha256 of its token ids: a key of fixed size, however long the prompt is."""
        return _digest(self.prompt)


def numbered(prompts: Iterable[Sequence[int]]) -> Iterator[NumberedPrompt]:
    """The prompts in order, each with its repetition."""
    repetitions: Counter[bytes] = Counter()
    for prompt in prompts:
        digest = _digest(prompt)
        yield NumberedPrompt(prompt, repetitions[digest])
        repetitions[digest] += 1


def _digest(prompt: Iterable[int]) -> bytes:
    return hashlib.sha256(array("q", prompt)).digest()


class ResponseCache:
    """The responses in a folder. A prompt that comes several times has as many responses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: defaultdict[bytes, list[Text]] = defaultdict(list)  # by digest of the prompt
        # Oldest first: what another run adds meanwhile does not take the place of older responses.
        files = folder.glob("*.safetensors")
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            self._take(Texts.load(file))

    def missing(self, prompts: Iterable[Sequence[int]]) -> list[NumberedPrompt]:
        """Those of `prompts` that have no response, in order."""
        return [each for each in numbered(prompts) if each.repetition >= len(self._of(each))]

    def add(self, prompts: Sequence[NumberedPrompt], responses: Iterable[Text]) -> None:
        """Keep the responses to a part of what was missing, in any order."""
        texts = Texts.of(responses)
        name = hashlib.sha256()
        for each in prompts:
            name.update(each.digest + each.repetition.to_bytes(4, "little"))
        texts.save(self._folder / f"{name.hexdigest()[:32]}.safetensors")
        self._take(texts)

    def responses(self, prompts: Iterable[Sequence[int]]) -> Iterator[Text]:
        """The response to each prompt, in order. None may be missing."""
        return (self._of(each)[each.repetition] for each in numbered(prompts))

    def _of(self, prompt: NumberedPrompt) -> list[Text]:
        return self._texts.get(prompt.digest, [])

    def _take(self, texts: Texts) -> None:
        for text in texts:
            self._texts[_digest(text.tokens[: text.prompt].tolist())].append(text)
