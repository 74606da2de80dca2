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


class UnansweredPrompt(NamedTuple):
    """A prompt without a response."""

    prompt: Sequence[int]  # token ids
    repetition: int  # how often the same prompt comes before it


def prompt_digest(prompt: Iterable[int]) -> bytes:
    """sha256 of a prompt's token ids: a key of fixed size, however long the prompt is."""
    return hashlib.sha256(array("q", prompt)).digest()


class ResponseCache:
    """The responses in a folder. A prompt that comes several times has as many responses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: defaultdict[bytes, list[Text]] = defaultdict(list)  # by `prompt_digest`
        # Oldest first: what another run adds meanwhile does not take the place of older responses.
        files = folder.glob("*.safetensors")
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            self._take(Texts.load(file))

    def missing(self, prompts: Iterable[Sequence[int]]) -> list[UnansweredPrompt]:
        """The requests of `prompts` that have no response, in order."""
        return [
            request
            for digest, request in _requests(prompts)
            if request.repetition >= len(self._of(digest))
        ]

    def add(self, requests: Sequence[UnansweredPrompt], responses: Iterable[Text]) -> None:
        """Keep the responses to a part of what was missing, in any order."""
        texts = Texts.of(responses)
        name = hashlib.sha256()
        for prompt, repetition in requests:
            name.update(prompt_digest(prompt) + repetition.to_bytes(4, "little"))
        texts.save(self._folder / f"{name.hexdigest()[:32]}.safetensors")
        self._take(texts)

    def responses(self, prompts: Iterable[Sequence[int]]) -> Iterator[Text]:
        """The response to each prompt, in order. None may be missing."""
        return (self._of(digest)[request.repetition] for digest, request in _requests(prompts))

    def _of(self, digest: bytes) -> list[Text]:
        return self._texts.get(digest, [])

    def _take(self, texts: Texts) -> None:
        for text in texts:
            self._texts[prompt_digest(text.tokens[: text.prompt].tolist())].append(text)


def _requests(prompts: Iterable[Sequence[int]]) -> Iterator[tuple[bytes, UnansweredPrompt]]:
    repetitions: Counter[bytes] = Counter()
    for prompt in prompts:
        digest = prompt_digest(prompt)
        yield digest, UnansweredPrompt(prompt, repetitions[digest])
        repetitions[digest] += 1
