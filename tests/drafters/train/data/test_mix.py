from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafters.train.data.mix import FILE, load_mix, save_mix
from drafters.train.data.token_sequences import Text, Texts


def texts(count: int) -> Texts:
    return Texts.of(Text(torch.arange(1, 5 + i), 2 + i % 3) for i in range(count))


def test_texts_are_read_as_they_were_written(tmp_path: Path):
    save_mix(texts(6), tmp_path)
    found = {tuple(text.tokens.tolist()): text.prompt for text in load_mix(tmp_path)}
    assert found == {tuple(text.tokens.tolist()): text.prompt for text in texts(6)}


def test_a_sample_has_whole_texts_within_its_size(tmp_path: Path):
    save_mix(texts(40), tmp_path, tokens=100)
    found = load_mix(tmp_path)
    assert 60 < sum(len(text.tokens) for text in found) <= 100
    whole = {tuple(text.tokens.tolist()) for text in texts(40)}
    assert all(tuple(text.tokens.tolist()) in whole for text in found)


@pytest.mark.parametrize(("new", "old", "of_new"), [(60, 400, 0.5), (60, 2, 0.95), (4, 400, 0.1)])
def test_half_of_the_room_is_kept_for_the_texts_of_the_head_before(
    tmp_path: Path, new: int, old: int, of_new: float
) -> None:
    before = [Text(torch.arange(100 + i, 110 + i), 3) for i in range(old)]
    save_mix(texts(new), tmp_path, tokens=400, old=before)
    sizes = [(int(text.tokens[0]) == 1, len(text.tokens)) for text in load_mix(tmp_path)]
    total = sum(size for _, size in sizes)
    assert 330 < total <= 400
    assert abs(sum(size for is_new, size in sizes if is_new) / total - of_new) < 0.08


def test_a_text_is_mixed_in_once(tmp_path: Path) -> None:
    save_mix(texts(6), tmp_path, old=list(texts(8)))
    assert len(load_mix(tmp_path)) == 8


def test_equal_texts_make_equal_files(tmp_path: Path):
    save_mix(texts(6), tmp_path)
    first = (tmp_path / FILE).read_bytes()
    save_mix(texts(6), tmp_path)
    assert (tmp_path / FILE).read_bytes() == first


def test_a_head_without_the_file_has_no_texts_and_another_file_is_refused(tmp_path: Path):
    assert load_mix(tmp_path) == []
    (tmp_path / FILE).write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="holds no texts"):
        load_mix(tmp_path)
