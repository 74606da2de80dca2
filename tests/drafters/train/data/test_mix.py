from __future__ import annotations

from pathlib import Path

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


def test_equal_texts_make_equal_files(tmp_path: Path):
    save_mix(texts(6), tmp_path)
    first = (tmp_path / FILE).read_bytes()
    save_mix(texts(6), tmp_path)
    assert (tmp_path / FILE).read_bytes() == first


def test_a_head_without_the_file_has_no_texts(tmp_path: Path):
    assert load_mix(tmp_path) == []
