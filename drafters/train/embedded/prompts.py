"""Prompts of the two workloads, as token ids: code to continue and questions to answer.

Training draws them from the training files, evaluation from the held-out ones; the functions
are the same, so the two differ in nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from drafters.train.embedded.chat import chat_samples
from drafters.train.embedded.data import SourceFile
from drafters.train.embedded.template import render

CODE_TOKENS = (48, 96, 160)  # prompt lengths
MAX_CHAT_TOKENS = 256


def code_prompts(
    files: Sequence[SourceFile], tokenizer: Tokenizer, count: int, seed: int
) -> list[list[int]]:
    """Pieces of files that end anywhere; a third of them begin where the file does."""
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
    files: Sequence[SourceFile], tokenizer: Tokenizer, count: int, seed: int, multiple: int = 1
) -> list[list[int]]:
    """Questions, rendered up to the point where the assistant speaks.

    Only prompts whose length is a multiple of `multiple`: a few lengths with many prompts each
    make full batches without padding.
    """
    rng = random.Random(f"chat:{seed}")
    samples = chat_samples(files, seed=0)
    rng.shuffle(samples)
    prompts: list[list[int]] = []
    for sample in samples:
        if len(prompts) == count:
            break
        text = render(sample.messages[:-1], add_generation_prompt=True)
        ids = tokenizer.encode(text).ids
        if len(ids) <= MAX_CHAT_TOKENS and len(ids) % multiple == 0:
            prompts.append(ids)
    return prompts
