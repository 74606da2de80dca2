"""Token rows for pretraining: files and chat turns, shuffled and packed without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from drafters.train.embedded.chat import chat_samples
from drafters.train.embedded.data import SourceFile
from drafters.train.embedded.template import render
from drafters.train.embedded.tokenizer import END_OF_TEXT

Tokens = npt.NDArray[np.int16]  # 8,192 entries fit


@dataclass(frozen=True, slots=True)
class Documents:
    """Tokenised training documents, each ending in the end-of-text token."""

    files: list[Tokens]
    chats: list[Tokens]


def tokenise(files: Sequence[SourceFile], tokenizer: Tokenizer, seed: int) -> Documents:
    """Encode files and the conversations derived from them."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = [file.text for file in files]
    talks = [render(sample.messages) for sample in chat_samples(files, seed)]

    def encode(batch: list[str]) -> list[Tokens]:
        return [np.array([*item.ids, end], np.int16) for item in tokenizer.encode_batch(batch)]

    return Documents(encode(texts), encode(talks))


def rows(documents: Documents, length: int, chat_share: float, seed: int) -> Iterator[torch.Tensor]:
    """Endless rows of `length + 1` tokens, int64; a share `chat_share` of them are conversations.

    Each kind has its own epochs, so that no document repeats before all others of its kind.
    """
    rng = np.random.default_rng(seed)
    sources = [_pack(documents.files, length + 1, rng), _pack(documents.chats, length + 1, rng)]
    while True:
        row = next(sources[int(rng.random() < chat_share)])
        yield torch.from_numpy(row.astype(np.int64))


def _pack(documents: list[Tokens], length: int, rng: np.random.Generator) -> Iterator[Tokens]:
    rest = np.empty(0, np.int16)
    while True:
        for index in rng.permutation(len(documents)):
            rest = np.concatenate([rest, documents[index]])
            # Successive rows share one token: a row's last label is the next row's first input.
            while len(rest) >= length:
                yield rest[:length]
                rest = rest[length - 1 :]
