"""Packed texts and batches of similar lengths."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafters.train.data.token_sequences import Text, Texts, batches, groups_within, pad


def _texts(lengths: list[int], seed: int = 0) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    return Texts.of(
        Text(torch.randint(50_000, (length,), generator=generator), length // 2)
        for length in lengths
    )


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_texts_come_back_as_they_were() -> None:
    rows = [Text(torch.tensor([7, 8, 2**31 - 1]), 2), Text(torch.tensor([4]), 0)]
    texts = Texts.of(rows)
    assert len(texts) == 2
    assert texts.lengths.tolist() == [3, 1]
    for old, new in zip(rows, texts, strict=True):
        assert new.tokens.dtype == torch.int64
        assert torch.equal(old.tokens, new.tokens)
        assert old.prompt == new.prompt
    with pytest.raises(IndexError):
        texts[2]
    with pytest.raises(IndexError):
        texts[-1]


def test_texts_survive_a_file_with_their_hash(tmp_path: Path) -> None:
    texts = _texts([5, 3, 9])
    texts.save(tmp_path / "new" / "a.safetensors")
    again = Texts.load(tmp_path / "new" / "a.safetensors")
    assert again.sha256 == texts.sha256
    assert [text.tokens.tolist() for text in again] == [text.tokens.tolist() for text in texts]
    assert [text.prompt for text in again] == [2, 1, 4]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.safetensors"]


def test_a_full_disk_and_a_damaged_file_are_errors_that_name_the_file(tmp_path: Path) -> None:
    """The fault: the library's own error, which commands do not know, ended them by a traceback."""
    file = tmp_path / "a.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match=f"{file} cannot be written"):
            _texts([5000]).save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{file} holds no tensors"):
        Texts.load(file)


def test_the_hash_sees_tokens_borders_and_prompts() -> None:
    def hashed(*rows: tuple[list[int], int]) -> str:
        return Texts.of(Text(torch.tensor(row), prompt) for row, prompt in rows).sha256

    hashes = [
        hashed(([1, 2], 1), ([3], 1)),
        hashed(([1], 1), ([2, 3], 1)),
        hashed(([1, 2], 2), ([3], 1)),
        hashed(([1, 2], 1), ([4], 1)),
        hashed(([3], 1), ([1, 2], 1)),
    ]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize(
    "row",
    [
        Text(torch.tensor([1, 2]), 3),
        Text(torch.tensor([1, 2]), -1),
        Text(torch.empty(0, dtype=torch.int64), 0),
        Text(torch.tensor([[1, 2]]), 1),
        Text(torch.tensor([1.0, 2.0]), 1),
    ],
)
def test_what_is_no_text_is_refused(row: Text) -> None:
    with pytest.raises(ValueError, match="text"):
        Texts.of([row])


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="holds no texts but weight"):
        Texts.load(tmp_path / "a.safetensors")
    parts = {
        "tokens": torch.zeros(3, dtype=torch.int32),
        "offsets": torch.tensor([0, 2, 4]),
        "prompts": torch.zeros(2, dtype=torch.int32),
    }
    save_file(parts, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="do not cover"):
        Texts.load(tmp_path / "b.safetensors")


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 200), st.integers(0, 2**31))
def test_an_epoch_has_every_text_once_within_the_budget(
    lengths: list[int], budget: int, seed: int
) -> None:
    epoch = list(batches(_texts(lengths), tokens=budget, generator=_generator(seed)))
    assert sorted(index for batch in epoch for index in batch) == list(range(len(lengths)))
    for batch in epoch:
        assert batch
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def test_batches_waste_little_and_change_from_epoch_to_epoch() -> None:
    lengths = torch.randint(20, 400, (2000,), generator=_generator()).tolist()
    texts, generator = _texts(lengths), _generator(1)
    first, second = (list(batches(texts, tokens=4000, generator=generator)) for _ in range(2))
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in first)
    assert padded < 1.1 * sum(lengths)  # random batches would need 1.8 times
    assert len(first) < 1.2 * sum(lengths) / 4000
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    # Long and short batches mixed: each window in order would be a ramp, with 1% of falls.
    longest = [max(lengths[i] for i in batch) for batch in first]
    falls = sum(after < before for before, after in pairwise(longest))
    assert 0.3 * len(first) < falls < 0.7 * len(first)
    again = list(batches(texts, tokens=4000, generator=_generator(1)))
    assert again == first


def test_groups_keep_the_order() -> None:
    assert list(groups_within("abcde", [3, 3, 4, 20, 1], 8)) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert list(groups_within([], [], 8)) == []


def test_padding_is_zero_on_the_right() -> None:
    rows = [Text(torch.tensor([5, 6]), 1), Text(torch.tensor([7, 8, 9]), 2)]
    tokens, prompts, ends = pad(rows)
    assert tokens.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert (tokens.dtype, prompts.tolist(), ends.tolist()) == (torch.int64, [1, 2], [2, 3])
