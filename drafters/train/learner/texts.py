"""The texts of a round: captured ones that the target finds probable, and those of the mix."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from drafters.learning.captured import Captured
from drafters.train.data.examples import encode_examples, read_examples
from drafters.train.data.hidden_states import BATCH_TOKENS
from drafters.train.data.mix import load_mix
from drafters.train.data.responses import respond
from drafters.train.data.token_sequences import Text, Texts, groups_within, pad
from drafters.train.learner.sequences import shares
from drafters.train.optimisation.loss import chunk_rows
from drafters.train.target import FrozenTarget

_RESPONSE_TOKENS, _TEMPERATURE = 256, 0.7  # of answers to prompts of --mix


def text_of(sequence: Captured) -> Text:
    """A captured sequence as a text."""
    tokens = torch.tensor([*sequence.prompt, *sequence.answer], dtype=torch.int64)
    return Text(tokens, len(sequence.prompt))


def answer_mark(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> int | None:
    """The first of the tokens with which the chat template begins an answer; None if it has no
    such tokens, or there is no template."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "Hello"}]
    options = {**template_kwargs, "tokenize": False}
    try:
        asked, answered = (
            tokenizer.apply_chat_template(chat, add_generation_prompt=begins, **options)
            for begins in (False, True)
        )
    except Exception:  # a template may raise anything; the prompts were rendered elsewhere
        return None
    if not answered.startswith(asked):
        return None
    ids = tokenizer(answered[len(asked) :], add_special_tokens=False)["input_ids"]
    return int(ids[0]) if ids else None


@torch.no_grad()
def mean_log_probabilities(target: FrozenTarget, texts: Texts) -> list[float]:
    """The logarithm of the probability that the target gives to a token of each answer, on average;
    in nats, at temperature 1. No prompt or answer is empty."""
    means = [0.0] * len(texts)
    order = texts.lengths.argsort(stable=True)
    for group in groups_within(order.tolist(), texts.lengths[order].tolist(), BATCH_TOKENS):
        rows = [texts[index] for index in group]
        final = target.states(pad(rows)[0], ()).final
        chunk = chunk_rows(target.shape.vocab_size)
        for index, row, states in zip(group, rows, final, strict=True):
            # The state at p - 1 predicts the token at p.
            before = states[row.prompt - 1 : len(row.tokens) - 1]
            answer = row.tokens[row.prompt :].to(before.device)
            total = 0.0
            for part, wanted in zip(before.split(chunk), answer.split(chunk), strict=True):
                logits = target.logits(part).float()
                total -= float(functional.cross_entropy(logits, wanted, reduction="sum"))
            means[index] = total / len(answer)
    return means


def within_prompt_tokens(
    sequences: Sequence[Captured], budget: int, least: int = 1
) -> list[Captured]:
    """Each tenant's newest sequences, as far as the prompts of all tenants have `budget` tokens,
    and `least` of each tenant whatever the budget; in the order in which they are given."""
    available = Counter[str]()
    for item in sequences:
        available[item.tenant] += len(item.prompt)
    if available.total() <= budget:
        return list(sequences)
    bounds, tokens, taken_of = shares(available, budget), Counter[str](), Counter[str]()
    kept = set[int]()
    newest_first = sorted(enumerate(sequences), key=lambda pair: pair[1].at, reverse=True)
    for index, item in newest_first:
        tenant, prompt = item.tenant, len(item.prompt)
        if taken_of[tenant] < least or tokens[tenant] + prompt <= bounds[tenant]:
            kept.add(index)
            tokens[tenant] += prompt
            taken_of[tenant] += 1
    return [item for index, item in enumerate(sequences) if index in kept]


def mix_of(target: FrozenTarget, args: argparse.Namespace, seed: int) -> list[Text]:
    """The texts that are mixed in, in random order: the target's answers to the prompts of --mix,
    else the texts beside the head. None where there is neither."""
    texts = _answered(target, args) if args.mix else load_mix(args.head)
    rows = target.shape.vocab_size
    usable = [
        text
        for text in texts
        if int(text.tokens.max()) < rows and 0 < text.prompt < len(text.tokens) - 1
    ]
    return random.Random(seed).sample(usable, len(usable))


def taken(texts: Sequence[Text], tokens: float) -> list[Text]:
    """The first texts, until their answers have `tokens` tokens."""
    found, total = list[Text](), 0
    for text in texts:
        if total >= tokens:
            break
        found.append(text)
        total += len(text.tokens) - text.prompt
    return found


def _answered(target: FrozenTarget, args: argparse.Namespace) -> list[Text]:
    """As many answers to prompts of --mix as a round can use, half of them greedy."""
    room = min(args.max_length, target.shape.max_position_embeddings) - _RESPONSE_TOKENS
    examples = read_examples(args.mix)
    prompts, _ = encode_examples(
        examples,
        target.tokenizer,
        max_tokens=room,
        template_kwargs=args.chat_template_kwargs,
    )
    if not prompts:
        raise ValueError(f"--mix: no prompt leaves room for an answer in {room} tokens")
    most = round(args.answer_tokens * args.mix_share / (1.0 - args.mix_share)) // 64
    prompts = random.Random(0).sample(prompts, min(len(prompts), max(most, 1)))
    half = len(prompts) // 2
    texts: list[Text] = []
    for part, temperature in ((prompts[:half], 0.0), (prompts[half:], _TEMPERATURE)):
        answers = respond(target, part, steps=_RESPONSE_TOKENS, temperature=temperature, seed=0)
        texts += [text for _, text in answers if len(text.tokens) > text.prompt + 1]
    return texts
