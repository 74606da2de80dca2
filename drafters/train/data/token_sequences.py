"""Packed token sequences to train on, and batches of sequences of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from drafters.tensor_files import read_tensors, write_tensors

_WINDOW_BATCHES = 32  # batches in a sorting window: enough to mix texts, with little padding


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's response to it."""

    tokens: torch.Tensor  # int64 [n], prompt and response, its end token included
    prompt: int  # length of the prompt

    @property
    def drafted_tokens(self) -> int:
        """Tokens that serving may draft: all of the response but its first one, which the target
        writes before anything is drafted."""
        return max(len(self.tokens) - self.prompt - 1, 0)


class Texts:
    """Many texts: all tokens in one int32 tensor, and where each text lies."""

    def __init__(
        self,
        tokens: torch.Tensor,  # int32 [all tokens]
        offsets: torch.Tensor,  # int64 [count + 1]: text i is tokens[offsets[i]:offsets[i + 1]]
        prompts: torch.Tensor,  # int32 [count]
    ) -> None:
        kinds = (tokens.dtype, offsets.dtype, prompts.dtype)
        if kinds != (torch.int32, torch.int64, torch.int32):
            raise ValueError(f"tokens, offsets and prompts of wrong types: {kinds}")
        if len(offsets) != len(prompts) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens):
            raise ValueError("offsets do not cover the tokens")
        self.lengths = offsets.diff()  # int64 [count]
        if (self.lengths < 1).any() or (prompts < 0).any() or (prompts > self.lengths).any():
            raise ValueError("a text needs a token, and its prompt lies within it")
        self._tokens, self._offsets, self._prompts = tokens, offsets, prompts

    @classmethod
    def of(cls, texts: Iterable[Text]) -> Self:
        """Join texts into one table. Raises ValueError if a text is not a row of token ids."""
        tokens: list[torch.Tensor] = []
        prompts: list[int] = []
        for text in texts:
            if text.tokens.dim() != 1 or text.tokens.is_floating_point():
                raise ValueError("a text is one row of token ids")
            tokens.append(text.tokens.to("cpu", torch.int32))
            prompts.append(text.prompt)
        lengths = torch.tensor([0, *map(len, tokens)], dtype=torch.int64)
        packed = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)
        return cls(packed, lengths.cumsum(0), torch.tensor(prompts, dtype=torch.int32))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Text:
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        start, end = self._offsets[index : index + 2].tolist()
        return Text(self._tokens[start:end].long(), int(self._prompts[index]))

    def __iter__(self) -> Iterator[Text]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def sha256(self) -> str:
        """Hash of the contents: the same for equal texts in equal order, however stored."""
        digest = hashlib.sha256()
        for part in (self._offsets, self._prompts, self._tokens):
            digest.update(part.contiguous().numpy())
        return digest.hexdigest()

    def save(self, file: Path) -> None:
        """Write the table atomically: a reader sees the old file or the whole new one. Raises
        OSError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = {"tokens": self._tokens, "offsets": self._offsets, "prompts": self._prompts}
        write_tensors(parts, file)

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a saved table. Raises ValueError if the file is not one."""
        parts = read_tensors(file)
        if set(parts) != {"tokens", "offsets", "prompts"}:
            raise ValueError(f"{file} holds no texts but {', '.join(sorted(parts)) or 'nothing'}")
        return cls(parts["tokens"], parts["offsets"], parts["prompts"])


def batches(texts: Texts, *, tokens: int, generator: torch.Generator) -> Iterator[list[int]]:
    """One epoch: every index once, in batches of at most `tokens` padded tokens.

    A text longer than that is a batch by itself. Texts are sorted by length only inside random
    windows, so that a text meets others in each epoch.
    """
    lengths = texts.lengths
    if not len(lengths):
        return
    window = max(1, _WINDOW_BATCHES * tokens // max(1, int(lengths.sum()) // len(lengths)))
    order = torch.randperm(len(lengths), generator=generator)
    groups: list[list[int]] = []
    for part in order.split(window):
        ascending = part[lengths[part].argsort(stable=True)]
        groups += groups_within(ascending.tolist(), lengths[ascending].tolist(), tokens)
    for index in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[index]


def groups_within(
    indices: Sequence[int], lengths: Sequence[int], tokens: int
) -> Iterator[list[int]]:
    """Cut `indices` into consecutive groups of at most `tokens` padded tokens: rows times longest.

    A group has at least one row. `lengths` are those of `indices`, in the same order.
    """
    start = longest = 0
    for position, length in enumerate(lengths):
        longest = max(longest, length)
        if position > start and (position + 1 - start) * longest > tokens:
            yield list(indices[start:position])
            start, longest = position, length
    if start < len(indices):
        yield list(indices[start:])


def pad(
    rows: Sequence[Text], width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad texts to one tensor: tokens [rows, `width` or longest], padded with 0 on the right; then
    lengths of the prompts and of the whole texts, [rows] each."""
    ends = torch.tensor([len(row.tokens) for row in rows])
    tokens = torch.zeros(len(rows), width or int(ends.max()), dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text.tokens)] = text.tokens
    return tokens, torch.tensor([row.prompt for row in rows]), ends
