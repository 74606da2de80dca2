"""A head before its training: shaped like its target, with the target's tables."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from drafters.model.checkpoint import load_head
from drafters.model.config import HeadConfig, Method, SelectorConfig
from drafters.model.config import default_taps as vllm_taps
from drafters.model.head import DraftHead
from drafters.model.head_check import TargetSizes, target_problems
from drafters.train.data.token_sequences import Texts
from drafters.train.target import FrozenTarget, TargetShape

# With more layers P-EAGLE accepts more (paper, table 5: acceptance length 2.69 / 3.58 / 3.92 with
# 1 / 2 / 4), at the cost of one pass; EAGLE-3 would pay for them in each of K passes.
LAYERS: dict[Method, int] = {"p-eagle": 4, "eagle3": 1}
_FIT_ROWS = 4096  # of a fit that are numbers of 64 bits at a time
_RIDGE = 1e-6  # keeps a singular fit from failing


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The shape of a new head; None takes the method's default or the target's value."""

    method: Method = "p-eagle"
    layers: int | None = None
    taps: Sequence[int] | None = None
    intermediate_size: int | None = None
    own_embeddings: bool | None = None  # P-EAGLE trains its own, EAGLE-3 shares the target's
    draft_vocabulary: Sequence[int] | None = None  # ascending target ids
    mask_token: int | None = None  # needed by P-EAGLE
    seed: int = 0


def default_taps(layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer: vLLM's default if the target has enough layers."""
    taps = vllm_taps(layers)
    return (
        taps if taps[0] < taps[1] < taps[2] else tuple(sorted({1, (layers + 1) // 2, layers - 1}))
    )


def mask_token_of(target: FrozenTarget, given: str | None) -> int:
    """The id of the mask token, a token that no text contains.

    `given` is a token or its id. The default is the tokenizer's mask token, or else a row of the
    vocabulary that the tokenizer does not use. Raises ValueError if there is neither.
    """
    tokenizer, rows = target.tokenizer, target.shape.vocab_size
    if given is not None:
        found = int(given) if given.isdecimal() else tokenizer.get_vocab().get(given)
        if found is None or not 0 <= found < rows:
            raise ValueError(f"--mask-token: the target has no token {given!r}")
        return int(found)
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    # Not from the number of tokens: some tokenizers leave ids out, and use the last one.
    if unused := set(range(rows)).difference(tokenizer.get_vocab().values()):
        return max(unused)
    raise ValueError(
        "the target has no mask token and no unused one: give --mask-token, a token or id that "
        "never occurs in text, such as a reserved special token"
    )


def check_vocabulary_size(size: int, always: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError unless `frequent_tokens` can choose `size` tokens."""
    if not len(always) <= size < vocab_size:
        raise ValueError(
            f"a draft vocabulary has {len(always)} to {vocab_size - 1} tokens, not {size}"
        )


def frequent_tokens(texts: Texts, size: int, always: Sequence[int], vocab_size: int) -> list[int]:
    """A draft vocabulary: the `size` commonest tokens of the responses, as ascending ids.

    `always` are kept however rare they are (end tokens). If fewer tokens occurred, unused ones fill
    the rest in the order of their ids.
    """
    check_vocabulary_size(size, always, vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.tokens[text.prompt :], minlength=vocab_size)
    counts[list(always)] = counts.sum() + 1
    return sorted(counts.argsort(descending=True, stable=True)[:size].tolist())


def known_head(target: FrozenTarget, folder: Path, dtype: torch.dtype) -> DraftHead:
    """Load a trained head to train it further. Raises ValueError if it is not of this target's
    shape."""
    return _lend(target, fitting_head(target, folder, dtype), dtype)


def fitting_head(target: FrozenTarget, folder: Path, dtype: torch.dtype) -> DraftHead:
    """A trained head as it is stored, on the CPU and without the target's tables. Raises ValueError
    if it is not of this target's shape."""
    shape = target.shape
    head = load_head(folder, dtype, shape.num_hidden_layers)
    own = frozenset(head.state_dict())
    size = TargetSizes(shape.hidden_size, shape.vocab_size, shape.num_hidden_layers)
    if problems := target_problems(head.config, size, own):
        raise ValueError(f"--init: {folder} is a head for another target: {'; '.join(problems)}")
    return head


@torch.no_grad()
def replace_draft_tokens(
    head: DraftHead, target: FrozenTarget, added: Sequence[int], dropped: Sequence[int]
) -> None:
    """Let a head draft the target ids `added` in the place of `dropped`, which are as many.

    Training has moved the output rows far from the target's, with which they began. A new token's
    row is made from the target's by the affine map that best makes those that stay from theirs:
    with its own it would be drafted far too often.
    """
    assert head.lm_head is not None  # it has a draft vocabulary
    matrix = head.lm_head.weight
    drafted = head.to_target(torch.arange(len(matrix), device=matrix.device))
    stays = ~torch.isin(drafted, torch.tensor(dropped, device=matrix.device))
    new = torch.tensor(added, device=matrix.device)
    rows = matrix[stays]
    made = _affine(target.lm_head[drafted[stays]], rows, target.lm_head[new])
    made = made.to(torch.bfloat16)  # `weights_digest` is then that of any type
    ids = torch.cat([drafted[stays], new])
    order = ids.argsort()
    matrix.copy_(torch.cat([rows, made.to(matrix.dtype)])[order])
    head.set_draft_vocabulary(ids[order])


def _affine(inputs: torch.Tensor, outputs: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What the affine map that fits `outputs` to `inputs` by least squares makes of `new`.

    `inputs` and `new` are rows of the target's size, `outputs` and the result of the head's.
    """

    def widened(rows: torch.Tensor) -> torch.Tensor:
        return functional.pad(rows.double(), (0, 1), value=1.0)

    width = inputs.shape[1] + 1
    square = torch.zeros(width, width, dtype=torch.float64, device=inputs.device)
    cross = square.new_zeros(width, outputs.shape[1])
    for some, wanted in zip(inputs.split(_FIT_ROWS), outputs.split(_FIT_ROWS), strict=True):
        known = widened(some)
        square += known.T @ known
        cross += known.T @ wanted.double()
    square.diagonal().mul_(1.0 + _RIDGE)
    return widened(new) @ torch.linalg.solve(square, cross)


def weights_digest(head: DraftHead) -> str:
    """sha256 of a head's own tensors, as numbers of bfloat16: the same in whichever type and on
    whichever device a run goes on."""
    digest = hashlib.sha256()
    for name, value in sorted(head.state_dict().items()):
        rounded = value.detach().to("cpu", torch.bfloat16).flatten()
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(rounded.view(torch.uint8).numpy())
    return digest.hexdigest()


def _attention_heads(shape: TargetShape) -> tuple[int, int]:
    """The numbers of attention heads and of key-value heads: the target's, or where the first does
    not divide the hidden size, the largest that do. transformers' Llama configuration, through
    which vLLM reads a head, refuses others (GLM-4.5 has 96 heads at 4096, such a head 64)."""
    divisors = (n for n in range(1, shape.num_attention_heads + 1) if shape.hidden_size % n == 0)
    heads = max(divisors)
    return heads, math.gcd(heads, shape.num_key_value_heads)


def planned_config(target: FrozenTarget, plan: HeadPlan) -> HeadConfig:
    """The configuration of a new head. Raises ValueError for a plan that the target cannot have."""
    shape = target.shape
    chosen = plan.draft_vocabulary
    if plan.method == "p-eagle" and plan.mask_token is None:
        raise ValueError("a P-EAGLE head needs a mask token")
    heads, key_value_heads = _attention_heads(shape)
    config = HeadConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=plan.intermediate_size or shape.intermediate_size,
        num_hidden_layers=plan.layers or LAYERS[plan.method],
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=shape.head_dim,
        ptd_token_id=plan.mask_token if plan.method == "p-eagle" else None,
        draft_vocab_size=len(chosen) if chosen else None,
        eagle_aux_hidden_state_layer_ids=tuple(plan.taps or default_taps(shape.num_hidden_layers)),
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        fc_norm=True,  # taps of different layers differ in size by orders of magnitude
    )
    if max(config.eagle_aux_hidden_state_layer_ids) > shape.num_hidden_layers:
        raise ValueError(f"taps beyond the target's {shape.num_hidden_layers} layers")
    return config


def new_head(target: FrozenTarget, plan: HeadPlan, dtype: torch.dtype) -> DraftHead:
    """A new head on the target's device: random matrices, embeddings and output matrix copied."""
    config, chosen = planned_config(target, plan), plan.draft_vocabulary
    own = plan.method == "p-eagle" if plan.own_embeddings is None else plan.own_embeddings
    torch.manual_seed(plan.seed)
    head = DraftHead(config, own_embeddings=own)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    if config.method == "p-eagle":
        nn.init.normal_(head.mask_hidden)
    with torch.no_grad():
        if head.embed_tokens is not None:
            head.embed_tokens.weight.copy_(target.embeddings)
        if chosen and head.lm_head is not None:
            ids = torch.tensor(chosen)
            head.set_draft_vocabulary(ids)
            head.lm_head.weight.copy_(target.lm_head[ids.to(target.device)])
    return _lend(target, head, dtype)


def new_selector(head: DraftHead, target: FrozenTarget, config: SelectorConfig, seed: int) -> None:
    """Give a head a new path selector; one that it has is replaced. Raises ValueError for EAGLE-3.

    Embeddings are far smaller than the head's states: the weights that multiply them begin larger,
    so that the token before counts as much as the state.
    """
    torch.manual_seed(seed)
    selector = head.add_selector(config)
    with torch.no_grad():
        # A layer that torch initialises gives 1/sqrt(3) of what it is given.
        selector.before.weight *= 3**0.5 / target.embeddings.float().square().mean().sqrt()


def _lend(target: FrozenTarget, head: DraftHead, dtype: torch.dtype) -> DraftHead:
    head = head.to(device=target.device, dtype=dtype)
    head.share(embeddings=target.embeddings.to(dtype), lm_head=target.lm_head.to(dtype))
    return head
