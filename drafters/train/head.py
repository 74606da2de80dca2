"""Train a P-EAGLE head for a target on the target's own text."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from drafters.model.checkpoint import save_head
from drafters.model.config import HeadConfig
from drafters.model.llama import Llama, load_llama
from drafters.model.peagle import PEagleHead
from drafters.train.embedded.tokenizer import MASK, load_tokenizer
from drafters.train.loop import LoopOptions, train_head
from drafters.train.progress import Progress
from drafters.train.provenance import write_provenance
from drafters.train.rollouts import load_rollouts
from drafters.train.runtime import prepare_cpu

LAYERS = 2  # each costs 8% of the target's twelve; four would eat what they gain
TAPS = (2, 6, 10)


def new_head(
    target: Llama, mask_token: int, seed: int, taps: tuple[int, ...] = TAPS, layers: int = LAYERS
) -> PEagleHead:
    """Initialise a head; its embeddings start as the target's, the rest at random."""
    shape = target.shape
    config = HeadConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        ptd_token_id=mask_token,
        eagle_aux_hidden_state_layer_ids=taps,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
    )
    torch.manual_seed(seed)
    head = PEagleHead(config)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    nn.init.normal_(head.mask_hidden)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.lm_head)
    return head.to(target.lm_head.dtype)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m drafters.train.head", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float)
    budget.add_argument("--tokens", type=int)
    defaults = LoopOptions()
    parser.add_argument("--batch-rows", type=int, default=defaults.batch_rows)
    parser.add_argument("--muon-lr", type=float, default=defaults.muon_lr)
    parser.add_argument("--adam-lr", type=float, default=defaults.adam_lr)
    parser.add_argument("--k-train", type=int, default=defaults.k_train)
    parser.add_argument("--taps", type=int, nargs="+", default=list(TAPS))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    prepare_cpu(args.threads)
    target = load_llama(args.target)
    mask_token = load_tokenizer(args.target).token_to_id(MASK)
    head = new_head(target, mask_token, args.seed, tuple(args.taps), args.layers)
    rollouts = load_rollouts(args.rollouts)
    progress = Progress(minutes=args.minutes, tokens=args.tokens)
    options = LoopOptions(
        batch_rows=args.batch_rows,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        k_train=args.k_train,
        seed=args.seed,
    )
    losses = train_head(head, target, rollouts, progress, options)
    save_head(head, args.out)
    write_provenance(
        args.out,
        ["drafters.train.head", *argv],
        args.seed,
        {
            "target_sha256": _sha256(args.target / "model.safetensors"),
            "rollouts_sha256": [_sha256(file) for file in args.rollouts],
            "k_train": args.k_train,
            "rows": sum(len(rollout.tokens) for rollout in rollouts),
            "tokens": progress.tokens,
            "steps": progress.steps,
            "minutes": round(progress.seconds / 60, 1),
            "loss_per_depth": [round(loss, 4) for loss in losses],
        },
    )
    print("loss per depth: " + " ".join(f"{loss:.3f}" for loss in losses))
    return 0


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
