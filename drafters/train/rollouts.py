"""On-policy text: the target's own continuations of training prompts.

A head is judged on text that the target writes, not on the corpus: trained on the corpus
alone it learns to predict what the target would not say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafters.model.llama import Llama, load_llama
from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.prompts import chat_prompts, code_prompts
from drafters.train.embedded.tokenizer import END_OF_TEXT, IM_END, load_tokenizer
from drafters.train.generate import generate
from drafters.train.progress import Progress
from drafters.train.runtime import prepare_cpu

STEPS = 160  # generated tokens a row
SAMPLED_SHARE = 0.3  # of the batches; the rest is greedy, as serving mostly is
TEMPERATURE = 0.7
_BATCH = 96
_CHAT_MULTIPLE = 16  # prompt lengths 16, 32, ... 256


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rows with prompts of one length. Text past `ends` was generated after an end token."""

    tokens: torch.Tensor  # [rows, prompt + steps]
    prompt: int
    ends: torch.Tensor  # [rows]: number of valid tokens, the end token included


def roll_out(
    target: Llama,
    prompts: Sequence[Sequence[int]],
    end_tokens: Sequence[int],
    *,
    temperature: float,
    generator: torch.Generator,
    steps: int = STEPS,
) -> Rollout:
    """Continue prompts of equal length."""
    text = generate(target, prompts, steps, temperature=temperature, generator=generator)
    tokens = torch.cat([torch.tensor(prompts), text], dim=1)
    return Rollout(tokens, len(prompts[0]), valid_lengths(text, end_tokens) + len(prompts[0]))


def valid_lengths(text: torch.Tensor, end_tokens: Sequence[int]) -> torch.Tensor:
    """Tokens of each row `[rows, steps]` up to and with the first end token: [rows]."""
    ended = torch.isin(text, torch.tensor(list(end_tokens)))
    first = ended.int().argmax(dim=1) + 1
    return torch.where(ended.any(dim=1), first, text.shape[1])


def batches(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Groups of up to `size` prompts of one length, so that nothing is padded."""
    for _, group in groupby(sorted(prompts, key=len), key=len):
        same = list(group)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def save_rollouts(rollouts: Sequence[Rollout], file: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for index, rollout in enumerate(rollouts):
        tensors[f"tokens.{index}"] = rollout.tokens.int()
        tensors[f"ends.{index}"] = rollout.ends.int()
    file.parent.mkdir(parents=True, exist_ok=True)
    prompts = ",".join(str(rollout.prompt) for rollout in rollouts)
    save_file(tensors, file, metadata={"prompts": prompts})


def load_rollouts(files: Sequence[Path]) -> list[Rollout]:
    rollouts: list[Rollout] = []
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for index, prompt in enumerate(stored.metadata()["prompts"].split(",")):
                tokens = stored.get_tensor(f"tokens.{index}").long()
                ends = stored.get_tensor(f"ends.{index}").long()
                rollouts.append(Rollout(tokens, int(prompt), ends))
    return rollouts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m drafters.train.rollouts", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the .safetensors file to write")
    parser.add_argument("--tokens", type=int, required=True, help="about how many to generate")
    parser.add_argument("--chat-share", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    prepare_cpu(args.threads)
    tokenizer, target = load_tokenizer(args.target), load_llama(args.target)
    ends = [tokenizer.token_to_id(name) for name in (END_OF_TEXT, IM_END)]
    files, count = load_corpus().train, args.tokens // STEPS
    talks = round(count * args.chat_share)
    prompts = chat_prompts(files, tokenizer, talks, args.seed, _CHAT_MULTIPLE)
    prompts += code_prompts(files, tokenizer, count - len(prompts), args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    order = np.random.default_rng(args.seed)
    progress = Progress(tokens=len(prompts) * STEPS)
    rollouts: list[Rollout] = []
    for batch in batches(prompts, _BATCH):
        temperature = TEMPERATURE if order.random() < SAMPLED_SHARE else 0.0
        rollouts.append(roll_out(target, batch, ends, temperature=temperature, generator=generator))
        progress.advance(len(batch) * STEPS)
    save_rollouts(rollouts, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
