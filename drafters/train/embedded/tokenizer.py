"""Train the embedded target's tokenizer, a byte-level BPE that `AutoTokenizer` and vLLM read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from drafters.train.embedded.chat import ChatSample, chat_samples
from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.template import CHAT_TEMPLATE, render

VOCAB_SIZE = 8192
MAX_LENGTH = 2048
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
MASK = "<|mask|>"  # the mask token of P-EAGLE's masked positions; never occurs in text
SPECIAL = (END_OF_TEXT, IM_START, IM_END, MASK)
# Not special: decoding must show these to the tool parser, also with skip_special_tokens.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A word includes one leading space or punctuation mark (`.append`, `_name`, `(self`); indentation
# is one token per line, which keeps Python's structure cheap to predict.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a tokenizer; SPECIAL and MARKERS get the ids from 0 on, in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL]
        + [AddedToken(name, special=False, normalized=False) for name in MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the trainer marks all of them special
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False, indent=1))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `folder` holds."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def main(argv: Sequence[str] | None = None) -> int:
    """Train a tokenizer and write its files; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.train.embedded.tokenizer", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the files to")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args(argv)
    corpus = load_corpus()
    samples: list[ChatSample] = chat_samples(corpus.train, seed=0)
    texts = [file.text for file in corpus.train]
    # Conversations repeat the sources: a tenth of them is enough for their own phrases.
    texts += [render(sample.messages) for sample in samples[::10]]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    save_tokenizer(tokenizer, args.out)
    size = sum(len(text.encode()) for text in texts)
    tokens = sum(len(item.ids) for item in tokenizer.encode_batch(texts))
    print(f"{len(texts)} texts, {size} bytes, {tokens} tokens, {size / tokens:.2f} bytes/token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
