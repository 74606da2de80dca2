"""Random targets and heads, and whether an engine drafts with them as the torch module does.

Each engine runs in float32, in a process of its own (engine_drafts.py and others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafters.model.checkpoint import save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from tests.drafters import engine_job
from tests.drafters.model.whole_text import draft

Step = dict[str, Any]

DRAFTS = Path(__file__).parent / "engine_drafts.py"
TIE = 1e-4  # of logits that are a few units apart; float32 sums in another order differ by 1e-6
PROMPTS = [list(range(5, 16)), [3, 190, 77, 12], list(range(120, 90, -1))]

P_EAGLE = HeadConfig(
    vocab_size=200, hidden_size=64, target_hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    eagle_aux_hidden_state_layer_ids=(1, 2, 3), max_position_embeddings=256, ptd_token_id=3,
)  # fmt: skip
EAGLE_3 = replace(P_EAGLE, ptd_token_id=None, num_hidden_layers=1)


@dataclass(frozen=True)
class Case:
    config: HeadConfig
    own: dict[str, bool] = field(default_factory=dict)  # own_embeddings, own_lm_head
    speculators: bool = False


CASES = {
    "p-eagle": Case(replace(P_EAGLE, fc_norm=True)),
    "p-eagle-draft-vocabulary": Case(
        # The outermost taps: the embedding, and the stream before the final norm.
        replace(
            P_EAGLE, draft_vocab_size=150, norm_before_residual=True, norm_before_fc=True,
            eagle_aux_hidden_state_layer_ids=(0, 2, 4),
        )
    ),
    "p-eagle-one-layer": Case(replace(P_EAGLE, num_hidden_layers=1)),
    # Upstream vLLM drafts without the selector.
    "selector-draft-vocabulary": Case(
        replace(
            P_EAGLE, fc_norm=True, draft_vocab_size=150,
            path_selector=SelectorConfig(8),
        )
    ),
    "selector": Case(
        replace(P_EAGLE, path_selector=SelectorConfig(8)), {"own_embeddings": False},
        speculators=True,
    ),
    "eagle3": Case(EAGLE_3, {"own_embeddings": False}),
    # Drafts go on behind them; upstream vLLM's end there on V1.
    "eagle3-few-positions": Case(replace(EAGLE_3, max_position_embeddings=32)),
    "eagle3-every-variant": Case(
        # Wider than the target, two taps.
        replace(
            EAGLE_3, num_hidden_layers=2, hidden_size=96, num_attention_heads=3,
            draft_vocab_size=120, norm_output=True, norm_before_fc=True, attention_bias=True,
            eagle_aux_hidden_state_layer_ids=(1, 3),
        )
    ),
    "p-eagle-speculators": Case(
        # vLLM's reader leaves out fc_norm and counts three taps unless told otherwise.
        replace(P_EAGLE, fc_norm=True, eagle_aux_hidden_state_layer_ids=(0, 1, 2, 3)),
        {"own_embeddings": False},
        speculators=True,
    ),
    "eagle3-speculators": Case(
        replace(
            EAGLE_3, num_hidden_layers=2, fc_norm=True, norm_output=True,
            norm_before_residual=True, draft_vocab_size=150,
        ),
        speculators=True,
    ),
    "eagle3-speculators-own-output": Case(
        # Absent from config.json, norm_before_residual would be true in vLLM.
        EAGLE_3, {"own_embeddings": False, "own_lm_head": True}, speculators=True
    ),
}  # fmt: skip


def randomise(module: torch.nn.Module, biases: float = 1.0) -> None:
    """Weights under which every part of the module moves what comes out; `biases` is the standard
    deviation of these."""
    for name, parameter in module.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
        elif parameter.dim() == 1 and "bias" not in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.4)
        elif parameter.dim() == 1 or "bias" in name:
            torch.nn.init.normal_(parameter, std=biases)
        elif "embed" in name or "mask_hidden" in name:
            torch.nn.init.normal_(parameter)
        else:
            sharp = 2.0 if "self_attn" in name else 1.0
            torch.nn.init.normal_(parameter, std=sharp * parameter.shape[-1] ** -0.5)


class RandomTarget:
    """A target with random weights on disk; `taps` as the engine hands them to a head."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model: Any = model.eval()
        randomise(model, biases=0.3)
        self.folder = folder
        model.save_pretrained(folder)
        self._streams: list[torch.Tensor] = []
        for module in (*self.model.model.layers, self.model.model.norm):
            module.register_forward_pre_hook(
                lambda _module, inputs: self._streams.append(inputs[0])
            )

    @torch.no_grad()
    def taps(self, tokens: list[int], ids: tuple[int, ...]) -> torch.Tensor:
        """[tokens, taps * hidden]: the residual stream after i layers, for each i of `ids`."""
        self._streams.clear()
        self.model(torch.tensor([tokens]))
        return torch.cat([self._streams[index][0] for index in ids], dim=-1)


class Target(RandomTarget):
    """A Llama that heads may borrow from."""

    def __init__(self, folder: Path, layers: int = 4) -> None:
        config = LlamaConfig(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        super().__init__(LlamaForCausalLM(config), folder)

    def lend(self, head: DraftHead) -> DraftHead:
        model = self.model
        if head.config.hidden_size == model.config.hidden_size:
            head.share(embeddings=model.model.embed_tokens.weight, lm_head=model.lm_head.weight)
        return head


def new_head(case: Case, target: Target) -> DraftHead:
    head = DraftHead(case.config, **case.own)
    randomise(head)
    if size := case.config.draft_vocab_size:
        head.set_draft_vocabulary(torch.randperm(case.config.vocab_size)[:size].sort().values)
    return target.lend(head.eval())


def save_heads(folder: Path, name: str, cases: Sequence[Case | str], target: Target) -> list[Path]:
    """Save a head of each case, with weights of its own; "" stands for the first one again."""
    saved: list[Path] = []
    for number, case in enumerate(cases):
        if isinstance(case, str):
            saved.append(saved[0])
            continue
        saved.append(folder / f"{name}-{number}")
        save_head(new_head(case, target), saved[-1])
    return saved


def swaps(heads: Sequence[Path]) -> list[str]:
    """What a job says of the heads that take the place of the first one, one after the other."""
    return ["" if head == heads[0] else str(head) for head in heads[1:]]


def steps_of(folder: Path, engines: dict[str, Any], **job: Any) -> dict[str, list[Step]]:
    """Engine -> its steps with drafts, of the head of its start, behind PROMPTS."""
    job = {"engines": engines, "prompts": PROMPTS, **job}
    result = engine_job.run(DRAFTS, folder, job, timeout=1200)
    return {name: entries[0]["steps"] for name, entries in result.items()}


def reference(head: DraftHead, target: RandomTarget, step: Step) -> tuple[list[int], torch.Tensor]:
    """(drafts after the text, their logits over the target's vocabulary [K, vocabulary])."""
    text, first, k = step["text"], step["first"], len(step["draft"])
    seen: list[torch.Tensor] = []

    def logits(output: torch.Tensor) -> torch.Tensor:
        seen.append(DraftHead.logits(head, output))
        return seen[-1]

    # Positions are relative to the head: its context may begin anywhere.
    taps = target.taps(text[:-1], head.config.eagle_aux_hidden_state_layer_ids)[first:]
    entered = torch.tensor(text[first + 1 :])
    with patch.object(head, "logits", logits):
        drafted = draft(head, entered, taps, k)
    rows = torch.cat(seen)
    wide = torch.full((k, head.config.vocab_size), float("-inf"))
    wide[:, head.to_target(torch.arange(rows.shape[1]))] = rows
    return drafted.tolist(), wide


def agrees(head: DraftHead, target: RandomTarget, step: Step, tie: float = TIE) -> bool:
    """Whether the drafts of a step are the module's, or tie with them."""
    ours, logits = reference(head, target, step)
    if head.selector is not None:  # a path: its scores are not the logits, and one follows another
        return ours == step["draft"]
    for mine, theirs, row in zip(ours, step["draft"], logits, strict=True):
        if mine == theirs:
            continue
        if row[mine] - row[theirs] > tie:
            return False
        if head.config.method == "eagle3":
            break  # the rest follows from another token
    return True
