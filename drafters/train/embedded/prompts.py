"""Prompts of the embedded target's workloads: code to continue, and questions to answer.

Training takes them from the training files, evaluation from the held-out files, both by the same
functions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from drafters.train.embedded.chat import ChatSample, chat_samples
from drafters.train.embedded.data import SourceFile, load_corpus
from drafters.train.embedded.template import render
from drafters.train.embedded.tokenizer import load_tokenizer

CODE_TOKENS = (48, 96, 160)  # prompt lengths
MAX_CHAT_TOKENS = 256


def some_files(files: Sequence[SourceFile], count: int | None, seed: int) -> Sequence[SourceFile]:
    """A sample of `count` files in their order, by `seed`; all of them if `count` is None."""
    if count is None or count >= len(files):
        return files
    chosen = random.Random(f"files:{seed}").sample(range(len(files)), count)
    return [files[index] for index in sorted(chosen)]


def code_prompts(
    files: Sequence[SourceFile], tokenizer: Tokenizer, count: int, seed: int
) -> list[list[int]]:
    """Pieces of files, as token ids; a third of them begin where their file does."""
    rng = random.Random(f"code:{seed}")
    encoded = [item.ids for item in tokenizer.encode_batch([file.text for file in files])]
    encoded = [ids for ids in encoded if len(ids) >= 2 * max(CODE_TOKENS)]
    prompts: list[list[int]] = []
    for index in range(count):
        ids, length = rng.choice(encoded), CODE_TOKENS[index % len(CODE_TOKENS)]
        start = 0 if rng.random() < 1 / 3 else rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


def chat_prompts(
    files: Sequence[SourceFile], tokenizer: Tokenizer, count: int, seed: int
) -> list[list[int]]:
    """Questions, as token ids, rendered up to where the assistant's answer begins."""
    prompts: list[list[int]] = []
    for sample in _shuffled_talks(files, seed):
        if len(prompts) == count:
            break
        text = render(sample.messages[:-1], add_generation_prompt=True)
        ids = tokenizer.encode(text).ids
        if len(ids) <= MAX_CHAT_TOKENS:
            prompts.append(ids)
    return prompts


def _shuffled_talks(files: Sequence[SourceFile], seed: int) -> list[ChatSample]:
    talks = chat_samples(files, seed=0)
    random.Random(f"chat:{seed}").shuffle(talks)
    return talks


def write_prompts(
    file: Path,
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    *,
    code: int,
    chat: int,
    seed: int,
) -> None:
    """Write JSON lines for `aerie train`: `code` prompts of code and `chat` conversations."""
    pieces = code_prompts(files, tokenizer, code, seed)
    lines: list[dict[str, object]] = [{"prompt": tokenizer.decode(ids)} for ids in pieces]
    talks = _shuffled_talks(files, seed)[:chat]
    lines += [{"messages": list(talk.messages[:-1])} for talk in talks]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write prompts made of source files; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.train.embedded.prompts", description=__doc__
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of its files")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--code", type=int, default=0, help="number of prompts of code")
    parser.add_argument("--chat", type=int, default=0, help="number of questions")
    parser.add_argument("--held-out", action="store_true", help="use files kept from training")
    parser.add_argument("--files", type=int, metavar="N", help="use N of the files [all]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    corpus = load_corpus()
    files = some_files(corpus.held_out if args.held_out else corpus.train, args.files, args.seed)
    tokenizer = load_tokenizer(args.tokenizer)
    write_prompts(args.out, files, tokenizer, code=args.code, chat=args.chat, seed=args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
