"""A sample of the texts that a head was trained on, as token ids in a file beside its weights.

A head that is trained further forgets what it no longer sees. `aerie learn` mixes these texts in,
and asks of a candidate that it drafts for them as well as before. The ids are the target's: the
file is of use with it alone. It holds texts that the head was made from, never captured traffic.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from drafters.train.data.token_sequences import Text, Texts

FILE = "mix.jsonl.gz"
TOKENS = 250_000  # of prompts and answers: some 200 KiB


def save_mix(texts: Texts, folder: Path, tokens: int = TOKENS, seed: int = 0) -> None:
    """Write whole texts in random order, `tokens` of their tokens at most."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    lines, taken = list[str](), 0
    for index in order:
        ids, prompt = texts[index].tokens.tolist(), texts[index].prompt
        if taken + len(ids) <= tokens:
            taken += len(ids)
            lines.append(_line(ids[:prompt], ids[prompt:]))
    # Without the time and the name, equal texts make equal files.
    (folder / FILE).write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def load_mix(folder: Path) -> list[Text]:
    """The texts beside a head; none if it has no such file. Raises ValueError for another file."""
    file = folder / FILE
    if not file.is_file():
        return []
    texts = []
    try:
        for line in gzip.decompress(file.read_bytes()).splitlines():
            entry = json.loads(line)
            prompt, answer = entry["prompt"], entry["answer"]
            tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
            texts.append(Text(tokens, len(prompt)))
    except (EOFError, KeyError, TypeError, ValueError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} holds no texts: {error!r}") from None
    return texts


def _line(prompt: list[int], answer: list[int]) -> str:
    # Digits, not base64: gzip makes two thirds of it.
    return json.dumps({"prompt": prompt, "answer": answer}, separators=(",", ":")) + "\n"
