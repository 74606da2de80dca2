"""The torch module drafts what vLLM drafts, for every variant of a head and both layouts; and our
drafter inside vLLM drafts what the module drafts, whatever K was in the steps before.

A random target, random heads, float32, real engines. Upstream vLLM reads the checkpoints: where
the module differs from it, the module is wrong. It does not see path selectors. Where our drafter
differs from the module, it drafted from hidden states that are not the text's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import HeadConfig, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.speculators import save_speculators
from tests.drafters import engine_job
from tests.drafters.model.whole_text import draft

pytestmark = engine_job.marks()

Step = dict[str, Any]

K = 4
TIE = 1e-4  # of logits that are a few units apart; float32 sums in another order differ by 1e-6
SCRIPT = Path(__file__).parents[1] / "engine_drafts.py"
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

STOCK = [name for name in CASES if name != "selector-draft-vocabulary"]  # what vLLM drafts with


def randomise(module: torch.nn.Module) -> None:
    """Weights under which every part of the module moves the drafts."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 and "bias" not in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.4)
        elif parameter.dim() == 1 or "embed" in name or "mask_hidden" in name:
            torch.nn.init.normal_(parameter)
        else:
            sharp = 2.0 if "self_attn" in name else 1.0
            torch.nn.init.normal_(parameter, std=sharp * parameter.shape[-1] ** -0.5)


class Target:
    """A random Llama; `taps` as the engine hands them to a head."""

    def __init__(self, folder: Path, layers: int = 4) -> None:
        config = LlamaConfig(
            vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            max_position_embeddings=256, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).eval()
        randomise(self.model)
        self.folder = folder
        self.model.save_pretrained(folder)
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    return Target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> checkpoint."""
    folder = tmp_path_factory.mktemp("heads")
    for name, case in CASES.items():
        head = new_head(case, target)
        if case.speculators:
            save_speculators(head, folder / name, target=str(target.folder), draft_tokens=K)
        else:
            save_head(head, folder / name)
    return {name: folder / name for name in CASES}


@pytest.fixture(scope="module")
def steps(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Step]]:
    """Name -> what vLLM drafted at every step."""
    engines: dict[str, dict[str, Any]] = {}
    for name in STOCK:
        case = CASES[name]
        if case.speculators:  # it names its target, its K and its method
            engines[name] = {"model": str(heads[name])}
            continue
        engines[name] = {
            "model": str(target.folder),
            "speculative_config": {
                "method": "eagle3",
                "model": str(heads[name]),
                "num_speculative_tokens": K,
                "parallel_drafting": case.config.method == "p-eagle",
            },
        }
    folder = tmp_path_factory.mktemp("engines")
    job = {"engines": engines, "prompts": PROMPTS, "max_tokens": 30, "stock": True}
    result: dict[str, list[Step]] = engine_job.run(SCRIPT, folder, job, timeout=900)
    return result


def reference(head: DraftHead, target: Target, step: Step) -> tuple[list[int], torch.Tensor]:
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


def agrees(head: DraftHead, target: Target, step: Step) -> bool:
    ours, logits = reference(head, target, step)
    if head.selector is not None:  # a path: its scores are not the logits, and one follows another
        return ours == step["draft"]
    for mine, theirs, row in zip(ours, step["draft"], logits, strict=True):
        if mine == theirs:
            continue
        if row[mine] - row[theirs] > TIE:
            return False
        if head.config.method == "eagle3":
            break  # the rest follows from another token
    return True


@pytest.mark.parametrize("name", STOCK)
def test_every_draft_is_vllms(
    name: str, target: Target, heads: dict[str, Path], steps: dict[str, list[Step]]
) -> None:
    head = target.lend(load_head(heads[name]))
    head.selector = None  # which vLLM does not see
    assert len(steps[name]) > 20
    # Something to tell apart: the last draft of a step differs from step to step.
    assert len({step["draft"][-1] for step in steps[name]}) > 5
    wrong = [step for step in steps[name] if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(steps[name])} steps"


SEVERAL_LAYERS = ["p-eagle", "p-eagle-draft-vocabulary", "eagle3-every-variant"]
ONE_LAYER = ["p-eagle-one-layer", "eagle3"]
CONTEXTS: dict[str, dict[str, Any]] = {
    "all is kept": {"catch_up_tokens": 256},
    "much is forgotten": {"catch_up_tokens": 6},
    # In a second layer, keys would know of what the context was cut from.
    "the beginning is cut": {"catch_up_tokens": 256, "context_tokens": 64},
}
SELECTORS = {"selector-draft-vocabulary": "all is kept", "selector": "much is forgotten"}
RESTLESS = [
    *SELECTORS.items(),
    *((name, "much is forgotten") for name in SEVERAL_LAYERS),
    *((name, "all is kept") for name in ("p-eagle", "eagle3-every-variant")),
    *((name, "the beginning is cut") for name in ONE_LAYER),
]


@pytest.fixture(scope="module")
def restless(
    target: Target, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Step]]:
    """Head and context -> what our drafter drafted, with another K at every step."""
    engines = {
        f"{name}, {context}": {
            "model": str(target.folder),
            "block_size": 32,
            "additional_config": {"aerie": {**CONTEXTS[context], "bfloat16_on_cpu": False}},
            "speculative_config": {
                "method": "eagle3",
                "model": str(heads[name]),
                "num_speculative_tokens": 7,
                "parallel_drafting": CASES[name].config.method == "p-eagle",
            },
        }
        for name, context in RESTLESS
    }
    folder = tmp_path_factory.mktemp("restless")
    job = {"engines": engines, "prompts": PROMPTS, "max_tokens": 90, "stock": False}
    result: dict[str, list[Step]] = engine_job.run(SCRIPT, folder, job, timeout=900)
    return result


@pytest.mark.parametrize(("name", "context"), RESTLESS)
def test_no_draft_comes_from_a_stale_state(
    name: str, context: str, target: Target, heads: dict[str, Path], restless: dict[str, list[Step]]
) -> None:
    head = target.lend(load_head(heads[name]))
    steps = restless[f"{name}, {context}"]
    assert len({len(step["draft"]) for step in steps}) == 7
    wrong = [step for step in steps if not agrees(head, target, step)]
    assert not wrong, f"{len(wrong)} of {len(steps)} steps"
    # What the case is for has happened: contexts began anew, or never did.
    assert any(step["first"] for step in steps) == (context != "all is kept")


@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_changes_drafts(
    name: str, target: Target, heads: dict[str, Path], restless: dict[str, list[Step]]
) -> None:
    """Else the comparison above would hold for a drafter without one. The first draft stays."""
    head = target.lend(load_head(heads[name]))
    head.selector = None
    changed = 0
    for step in restless[f"{name}, {SELECTORS[name]}"]:
        ours, _ = reference(head, target, step)
        assert ours[0] == step["draft"][0]
        changed += ours != step["draft"]
    assert changed > 10


def _no_residual_norm(head: DraftHead) -> None:
    head.layers[0].norm_before_residual = False


def _no_output_norm(head: DraftHead) -> None:
    head.config = replace(head.config, norm_output=False)


# What the comparison must notice: part of a head -> (case, how it is spoilt).
FAULTS: dict[str, tuple[str, Callable[[DraftHead], Any]]] = {
    "norm_before_residual": ("p-eagle-draft-vocabulary", _no_residual_norm),
    "norm_output": ("eagle3-every-variant", _no_output_norm),
    "input_norm": ("eagle3-every-variant", lambda head: head.input_norm.weight.fill_(1.0)),
    "o_proj.bias": (
        "eagle3-every-variant",
        lambda head: head.layers[1].self_attn.o_proj.bias.zero_(),
    ),
    "fc_norm": ("p-eagle-speculators", lambda head: head.fc_norm[2].weight.fill_(1.0)),
    "mask_hidden": ("p-eagle", lambda head: head.mask_hidden.zero_()),
    "d2t": ("p-eagle-draft-vocabulary", lambda head: head.d2t.zero_()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_with_one_fault_drafts_otherwise(
    fault: str, target: Target, heads: dict[str, Path], steps: dict[str, list[Step]]
) -> None:
    name, spoil = FAULTS[fault]
    head = target.lend(load_head(heads[name]))
    with torch.no_grad():
        spoil(head)
    assert not all(agrees(head, target, step) for step in steps[name])
