"""A sample of the texts that a head was trained on, as token ids in a file beside its weights.

A head that is trained further forgets what it no longer sees. `aerie learn` mixes these texts in,
and asks of a candidate that it drafts for them as well as before. The ids are the target's: the
file is of use with it alone. It holds texts that the head was made from, never captured traffic.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from drafters.train.data.token_sequences import Text, Texts

FILE = "mix.jsonl.gz"
TOKENS = 250_000  # of prompts and answers: some 200 KiB


def save_mix(
    texts: Texts, folder: Path, tokens: int = TOKENS, seed: int = 0, old: Sequence[Text] = ()
) -> None:
    """Write whole texts in random order, `tokens` of their tokens at most.

    `old` are the texts of the head that was trained further, which it would forget without them:
    half of the room is theirs, and what either of the two leaves is the other's.
    """
    of_old = min(sum(len(text.tokens) for text in old), tokens // 2)
    lines: dict[str, int] = {}
    _add(lines, texts, tokens - of_old, seed)
    _add(lines, old, tokens, seed)
    # Without the time and the name, equal texts make equal files.
    (folder / FILE).write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def _add(lines: dict[str, int], texts: Texts | Sequence[Text], tokens: int, seed: int) -> None:
    """Add lines of whole texts in random order, each with its tokens, up to `tokens` in all."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    taken = sum(lines.values())
    for index in order:
        text, size = texts[index], len(texts[index].tokens)
        if taken + size <= tokens and (line := _line(text)) not in lines:
            lines[line] = size
            taken += size


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


def _line(text: Text) -> str:
    ids = text.tokens.tolist()
    content = {"prompt": ids[: text.prompt], "answer": ids[text.prompt :]}
    # Digits, not base64: gzip makes two thirds of it.
    return json.dumps(content, separators=(",", ":")) + "\n"
