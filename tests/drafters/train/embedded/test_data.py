"""The embedded corpus: its split, derived conversations, training rows and tokenizer."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.train.embedded.chat import chat_samples
from drafters.train.embedded.data import Corpus, SourceFile, is_held_out, load_corpus
from drafters.train.embedded.stream import Documents, rows
from drafters.train.embedded.tokenizer import MARKERS, SPECIAL, save_tokenizer, train_tokenizer

CODE = '''"""Sums and the like."""

def add(first, second):
    """Return the sum of both arguments."""
    return first + second


class Box:
    def test_open(self):
        self.assertEqual(add(1, 2), 3)
        self.assertEqual(add(2, 2), 4)
'''


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def test_split_shares_no_path_and_no_content(corpus: Corpus) -> None:
    train, held_out = corpus.train, corpus.held_out
    assert len(train) + len(held_out) == len(corpus.files)
    assert not {file.path for file in train} & {file.path for file in held_out}
    assert not {file.text for file in train} & {file.text for file in held_out}
    assert 0.01 < len(held_out) / len(corpus.files) < 0.06


def test_split_depends_on_the_path_alone() -> None:
    # Fixed for ever: figures of different Python releases are about the same files.
    assert [
        p for p in ("argparse.py", "ast.py", "heapq.py", "json/decoder.py") if is_held_out(p)
    ] == []
    assert sum(is_held_out(f"module{index}.py") for index in range(2000)) == pytest.approx(
        60, abs=25
    )


def test_corpus_reads_filters_and_deduplicates(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    (tmp_path / "b.py").write_text(CODE)
    (tmp_path / "c.py").write_bytes(CODE.encode() + b"# \xff\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "d.py").write_text(CODE + "# other\n")
    found = load_corpus(tmp_path)
    assert [file.path for file in found.files] == ["a.py"]
    (tmp_path / "a.py").write_text(CODE + "# changed\n")
    assert load_corpus(tmp_path).sha256 != found.sha256


def test_chats_quote_their_file() -> None:
    samples = chat_samples([SourceFile("box.py", CODE)], seed=0)
    kinds = {sample.kind for sample in samples}
    assert "module" in kinds
    assert kinds & {"write", "explain", "complete"}
    assert samples == chat_samples([SourceFile("box.py", CODE)], seed=0)
    for sample in samples:
        answer = sample.messages[-1]["content"].removeprefix("```python\n").removesuffix("\n```")
        assert all(line.strip() in CODE for line in answer.splitlines()), answer


def test_explained_code_does_not_contain_its_answer() -> None:
    for seed in range(20):
        for sample in chat_samples([SourceFile("box.py", CODE)], seed):
            if sample.kind == "explain":
                assert sample.messages[-1]["content"] not in sample.messages[-2]["content"]


def test_rows_see_every_document_before_any_twice() -> None:
    files = [np.full(10, index, np.int16) for index in range(1, 9)]
    stream = rows(Documents(files, files), length=20, chat_share=0.0, seed=3)
    batch = torch.stack(list(islice(stream, 4)))
    assert batch.shape == (4, 21)
    # 4 rows of 20 new tokens are the 80 of one epoch.
    assert sorted(set(batch[:, :-1].flatten().tolist())) == list(range(1, 9))


def test_tokenizer_files_and_ids(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([CODE] * 3, vocab_size=300)
    save_tokenizer(tokenizer, tmp_path)
    for index, name in enumerate(SPECIAL + MARKERS):
        assert tokenizer.token_to_id(name) == index
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    special = {item["content"]: item["special"] for item in document["added_tokens"]}
    assert special == {name: name in SPECIAL for name in SPECIAL + MARKERS}
    text = CODE + "\n\n  \tüñí ☃ 12345\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|mask|>") not in tokenizer.encode(text).ids
