"""Whole rounds on a tiny target, interrupted wherever a kill could come, and poisoned."""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.learning.captured import FOLDER, Captured
from drafters.learning.json_file import replace_json
from drafters.learning.lineage import CANDIDATE, REFUSED, Generation, Lineage
from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import SelectorConfig
from drafters.model.head import DraftHead
from drafters.train.data.mix import save_mix
from drafters.train.data.responses import respond
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.learner import round as rounds
from drafters.train.learner.options import learn_parser
from drafters.train.learner.round import Round
from drafters.train.learner.round_folder import RoundFolder
from drafters.train.learner.sequences import is_held_back
from drafters.train.optimisation.loop import Trainer
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead
from tests.drafters.train.tiny import VOCABULARY

STEPS = 40


class Killed(BaseException):
    """Ends a round where a kill would, past every `except Exception`."""


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(200) for _ in range(draw.randint(3, 9))] for _ in range(count)]


@cache
def answers(target: FrozenTarget, count: int, seed: int) -> list[tuple[int, Text]]:
    """Prompts' numbers and greedy answers of the target: many tests need the same ones."""
    return list(respond(target, prompts(count, seed), steps=STEPS, temperature=0.0, seed=0))


def as_captured(tenant: str, answered: Iterable[tuple[int, Text]]) -> list[Captured]:
    """Numbered answers as a gateway captures them."""
    found = []
    for number, text in answered:
        ids = text.tokens.tolist()
        prompt, answer = ids[: text.prompt], ids[text.prompt :]
        # Two drafts of the head, of which one failed, and one of another source.
        steps = [(3, 2), (1, 0), (0, 4)]
        found.append(Captured(1000.0 + number, tenant, 0, prompt, answer, steps))
    return found


def served(target: FrozenTarget, tenant: str, count: int, seed: int) -> list[Captured]:
    """Greedy answers of the target, as a gateway captures them."""
    return as_captured(tenant, answers(target, count, seed))


def write(folder: Path, name: str, sequences: list[Captured]) -> None:
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"{name}.jsonl").write_bytes(b"".join(item.line() for item in sequences))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> FrozenTarget:
    """One for all: `answers` keeps what it wrote. No test changes it, and rounds load their own."""
    return FrozenTarget.load(target_folder)


@pytest.fixture(autouse=True)
def everything_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads here begin with random weights: half of the way back to those is no head."""
    monkeypatch.setattr(rounds, "_KEPT_SHARE", 1.0)


@pytest.fixture
def learning(tmp_path: Path, target: FrozenTarget, target_folder: Path, new_head: NewHead) -> Path:
    """A folder of learning, and beside it a head that drafts badly, with a mix."""
    save_head(new_head(), tmp_path / "head")
    save_mix(Texts.of(text for _, text in answers(target, 24, 9)), tmp_path / "head")
    (tmp_path / "dir").mkdir()
    write(tmp_path / "dir", "a", served(target, "alice", 60, seed=1))
    return tmp_path / "dir"


@pytest.fixture
def options(learning: Path, target_folder: Path) -> argparse.Namespace:
    return learn_parser(None).parse_args([
        str(learning), "--target", str(target_folder), "--head", str(learning.parent / "head"),
        "--k", "3", "--epochs", "6", "--answer-tokens", "4000", "--device", "cpu",
        "--muon-lr", "0.02", "--adam-lr", "0.01",
    ])  # fmt: skip


def run(options: argparse.Namespace) -> Generation:
    work = RoundFolder(options.folder / "work")
    work.round.parent.mkdir(exist_ok=True)
    return Round(options, work).run()


def test_a_round_makes_a_candidate_that_drafts_better(options: argparse.Namespace):
    found = run(options)
    facts = found.provenance
    assert (found.number, found.verdict, facts["parent"], facts["reason"]) == (
        1, CANDIDATE, 0, None,
    )  # fmt: skip
    assert facts["replay"]["captured"]["interval"][0] > 1.0
    assert facts["replay"]["captured"]["before"] < facts["replay"]["captured"]["after"]
    assert facts["replay"]["mix"]["answers"] >= 1
    data = facts["data"]
    assert data["sequences"] + data["held_back"] == 60 and data["mixed"] >= 15
    assert data["held_back_by"] == "prompt"
    assert facts["replay"]["captured"]["prompts"] == data["held_back"]
    assert data["tenants"] == {"alice": data["tokens"]}
    assert data["served"] == {"0": {"drafts": 120, "accepted": 120}}
    assert (data["from"], data["to"]) == ("1970-01-01T00:16:40+00:00", "1970-01-01T00:17:39+00:00")
    assert facts["training"]["steps"] > 10 and facts["selector_training"] is None
    assert len(facts["training"]["loss_per_depth"]) == 3
    assert facts["torch"] == torch.__version__ and len(facts["target_sha256"]) == 64
    assert load_head(found.folder).config == load_head(options.head).config
    work = RoundFolder(options.folder / "work")
    assert work.plan() is None and work.since() == 1059.0 and not work.round.exists()


def test_of_few_long_answers_a_better_head_becomes_a_candidate_too(options: argparse.Namespace):
    """An eighth of what is trained on would be two answers here, and prove nothing."""
    options.answer_tokens, options.epochs = 16 * STEPS, 80.0
    found = run(options)
    assert found.provenance["data"]["held_back"] >= 5
    assert found.verdict == CANDIDATE, found.provenance["replay"]


def test_a_service_of_five_prompts_learns(options: argparse.Namespace, target: FrozenTarget):
    """None of them is held back as a prompt, so that nothing could be proven."""
    five = [prompt for prompt in prompts(60, seed=3) if not is_held_back(prompt)][:5]
    sampled = sorted(respond(target, five * 12, steps=STEPS, temperature=1.0, seed=0))
    write(options.folder, "a", as_captured("alice", sampled))
    options.least_log_probability = -20.0  # a target of random weights is sure of nothing
    options.epochs = 1.0
    facts = run(options).provenance
    data, captured = facts["data"], facts["replay"]["captured"]
    assert data["held_back_by"] == "prompt and answer"
    assert data["sequences"] + data["held_back"] + sum(data["left_out"].values()) == 60
    assert captured["answers"] == data["held_back"] >= captured["prompts"]
    assert 2 <= captured["prompts"] <= 5
    assert captured["interval"] is not None


@pytest.mark.parametrize(
    ("by_answer", "name"),
    [([False], "prompt"), ([True, True], "prompt and answer"), ([True, False], "both")],
)
def test_the_provenance_says_how_answers_were_held_back(by_answer: list[bool], name: str):
    assert rounds._held_back_by(by_answer) == name


def test_answers_to_a_single_prompt_are_not_trained_on(
    options: argparse.Namespace, target: FrozenTarget
):
    """Its replay would have no interval, so that the candidate would be refused."""
    sampled = respond(target, [[5, 9, 40]] * 30, steps=STEPS, temperature=1.0, seed=0)
    write(options.folder, "a", as_captured("alice", sampled))
    options.least_log_probability = -20.0
    with pytest.raises(ValueError, match="too little can be learned from"):
        run(options)


def test_texts_of_the_mix_are_replayed_however_little_is_trained_on(
    options: argparse.Namespace, target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
):
    """An eighth of what is trained on would be too few to see a loss of 2%; all of a large mix
    would take longer than the training."""
    texts = [text for _, text in answers(target, 24, 9)]
    held_back = [text for text in texts if is_held_back(text.tokens[: text.prompt].tolist())]
    options.answer_tokens, options.epochs = 8 * STEPS, 1.0
    mix = run(options).provenance["replay"]["mix"]
    assert mix["answers"] == len(held_back) > 1
    assert mix["tokens"] == sum(text.drafted_tokens for text in held_back)
    monkeypatch.setattr(rounds, "_JUDGED_OF_MIX", 1)
    assert run(options).provenance["replay"]["mix"]["answers"] == 1


def test_the_next_round_goes_on_from_the_head_in_force(
    options: argparse.Namespace, target: FrozenTarget
):
    lineage = Lineage(options.folder)
    lineage.put_in_force(run(options).number)
    write(options.folder, "b", served(target, "alice", 60, seed=2))
    second = run(options)
    assert (second.number, second.provenance["parent"]) == (2, 1)
    assert second.provenance["replay"]["against"] == 1
    options.epochs = 0.1
    lineage.pin(0)
    assert run(options).provenance["parent"] == 0
    lineage.pin(None)
    lineage.put_in_force(77)  # whose folder somebody deleted
    assert run(options).provenance["parent"] == 0


def test_a_candidate_is_compared_with_the_first_head_on_the_mix(
    options: argparse.Namespace, new_head: NewHead
):
    """The one in force may have forgotten the mix, so that to be no worse is no merit."""
    lineage = Lineage(options.folder)
    first = run(options)
    assert first.provenance["replay"]["mix_against_first"] is None
    lineage.put_in_force(first.number)
    # Of the two heads the better one is the first: the second one forgot what it knew.
    (weights,) = first.folder.glob("model.safetensors")
    good = weights.read_bytes()
    shutil.copy(options.head / weights.name, weights)
    (options.head / weights.name).write_bytes(good)
    options.muon_lr = options.adam_lr = 1e-6
    replayed = run(options).provenance["replay"]
    assert replayed["mix"]["ratio"] >= 0.98 > replayed["mix_against_first"]["ratio"]
    assert replayed["mix_against_first"]["answers"] == replayed["mix"]["answers"]
    assert lineage.generation(2).provenance["reason"] == "worse on the texts that are mixed in"


def test_a_round_that_another_first_head_overtakes_adds_nothing(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    """The learner may run elsewhere while the gateway is started with another head."""
    options.epochs = 1.0
    lineage = Lineage(options.folder)
    lineage.descend_from("a target and a head")
    select = Round._select

    def started_anew(self: Round, plan: dict[str, Any]) -> None:
        select(self, plan)
        lineage.descend_from("a target and a better-head")

    with monkeypatch.context() as patch:
        patch.setattr(Round, "_select", started_anew)
        with pytest.raises(ValueError, match="another head or target"):
            run(options)
    assert lineage.generations() == []
    assert run(options).number == 1


def test_a_gateway_that_is_started_with_another_head_meanwhile_ends_the_round(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    """While the texts were chosen: the plan would be one for the new head."""

    def started_anew(*args: Any) -> list[Text]:
        Lineage(options.folder).descend_from(f"a target {'a' * 64}")
        return []

    monkeypatch.setattr(rounds, "mix_of", started_anew)
    with pytest.raises(ValueError, match="another head than --head"):
        run(options)
    assert RoundFolder(options.folder / "work").plan() is None


def test_half_of_what_a_round_changed_is_kept(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    """All of it forgets the texts of the mix, round by round."""
    before = load_head(options.head).state_dict()
    whole = load_head(run(options).folder).state_dict()
    monkeypatch.undo()
    monkeypatch.setattr(Lineage, "add", lambda self, folder, record: kept.append(load_head(folder)))
    kept: list[DraftHead] = []
    run(options)
    half = kept[0].state_dict()
    assert any(not torch.equal(before[name], whole[name]) for name in before)
    for name, weight in half.items():
        wanted = (before[name].float() + whole[name].float()) / 2.0
        torch.testing.assert_close(weight.float(), wanted, atol=2e-3, rtol=2e-2, msg=name)


def test_a_round_reads_no_more_prompts_than_it_may(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rounds, "_PROMPT_TOKENS", 0.02)  # 80 tokens of prompts, of some 300
    work = RoundFolder(options.folder / "work")
    work.round.parent.mkdir()
    plan = Round(options, work)._choose()
    data, texts = plan["data"], Texts.load(work.round / "texts.safetensors")
    prompts = [text.prompt for text in texts][: data["sequences"]]
    assert 40 < sum(prompts) <= 80
    assert data["left_out"]["prompt tokens"] == 60 - data["sequences"] - data["held_back"]


def test_a_head_that_learns_nothing_is_refused(options: argparse.Namespace):
    options.muon_lr = options.adam_lr = 0.0
    options.epochs = 0.1
    found = run(options)
    assert found.verdict == REFUSED
    assert found.provenance["reason"] == "not better on captured answers"
    assert [file.name for file in found.folder.iterdir()] == ["provenance.json"]


def die_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    def killed(*args: object, **more: object) -> None:
        raise Killed

    monkeypatch.setattr(owner, name, killed)


def die_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original: Callable[..., object] = getattr(owner, name)

    def killed(*args: Any, **more: Any) -> None:
        original(*args, **more)
        raise Killed

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.parametrize(
    ("die", "owner", "name"),
    [
        (die_before, rounds, "mean_log_probabilities"),
        (die_before, RoundFolder, "begin"),
        (die_after, RoundFolder, "begin"),
        (die_after, rounds, "save_head"),
        (die_after, RoundFolder, "keep"),
        (die_before, Lineage, "add"),
        (die_after, Lineage, "add"),
        (die_before, rounds.shutil, "rmtree"),
    ],
    ids=lambda item: getattr(item, "__name__", str(item)),
)
def test_a_round_goes_on_wherever_it_was_killed(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, die: Any, owner: Any, name: str
):
    with monkeypatch.context() as patch:
        die(patch, owner, name)
        with pytest.raises(Killed):
            run(options)
    found = run(options)
    assert found.verdict == CANDIDATE
    assert [item.number for item in Lineage(options.folder).generations()] == [1]
    assert RoundFolder(options.folder / "work").since() == 1059.0


@pytest.mark.parametrize("draft_vocabulary", [False, True], ids=["all-tokens", "few-tokens"])
def test_training_goes_on_from_where_it_was_saved(
    options: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    new_head: NewHead,
    target: FrozenTarget,
    draft_vocabulary: bool,
):
    if draft_vocabulary:
        save_head(drafting_what_is_not_written(new_head, target), options.head)
    update, done = Trainer._update, []

    def counted(self: Trainer, indices: list[int]) -> None:
        done.append(indices)
        update(self, indices)

    monkeypatch.setattr(Trainer, "_update", counted)
    run(options)
    whole = load_head(Lineage(options.folder).generation(1).folder).state_dict()
    number = len(done)
    done.clear()

    def dies_in_the_middle(self: Trainer, indices: list[int]) -> None:
        if len(done) == number // 2:
            raise Killed
        counted(self, indices)

    monkeypatch.setattr(rounds, "_SAVE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", dies_in_the_middle)
        with pytest.raises(Killed):
            run(options)
    second = run(options)
    assert len(done) == number
    for key, weight in load_head(second.folder).state_dict().items():
        assert torch.equal(weight, whole[key]), key


def die_behind_a_save(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a round whose training was saved and then killed."""
    monkeypatch.setattr(rounds, "_SAVE_S", 0.0)
    with monkeypatch.context() as patch:
        die_after(patch, Trainer, "save")
        with pytest.raises(Killed):
            run(options)


def test_another_k_begins_the_training_anew(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    """The gateway was started again with another `--k`: no round is lost for that."""
    die_behind_a_save(options, monkeypatch)
    options.k += 1
    assert run(options).provenance["k"] == options.k


def test_a_saved_training_that_is_damaged_begins_anew(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    die_behind_a_save(options, monkeypatch)
    (saved,) = RoundFolder(options.folder / "work").round.glob("resume-*.pt")
    saved.write_bytes(saved.read_bytes()[:-1000])
    assert run(options).verdict == CANDIDATE


def test_a_selector_is_trained_on_too(
    options: argparse.Namespace, target: FrozenTarget, new_head: NewHead
):
    head = new_head(draft_vocab_size=None)
    head.add_selector(SelectorConfig(8, candidates=8))
    for parameter in head.selector.parameters():  # type: ignore[union-attr]
        torch.nn.init.normal_(parameter, std=0.1)
    save_head(head, options.head)
    found = run(options)
    before, after = (load_head(folder).state_dict() for folder in (options.head, found.folder))
    assert found.provenance["selector_training"]["loss"] == "distribution"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("selector.") for name in changed)
    assert "fc.weight" in changed


def written(target: FrozenTarget) -> set[int]:
    """The tokens of the answers that `learning` has captured."""
    return {token for item in served(target, "alice", 60, seed=1) for token in item.answer}


def drafting_what_is_not_written(
    new_head: NewHead, target: FrozenTarget, **changes: int
) -> DraftHead:
    """A head with a draft vocabulary that leaves out the tokens of the captured answers."""
    there = written(target)
    others = [token for token in range(VOCABULARY - 1) if token not in there]
    head = new_head(draft_vocab_size=64, **changes)
    head.set_draft_vocabulary(torch.tensor(sorted([*others, *sorted(there)][:64])))
    return head


@pytest.mark.parametrize("size", [16, 24], ids=["as-its-target", "wider"])
def test_a_head_drafts_the_tokens_of_its_traffic(
    options: argparse.Namespace, new_head: NewHead, target: FrozenTarget, size: int
):
    """Also those that its first draft vocabulary left out."""
    save_head(drafting_what_is_not_written(new_head, target, hidden_size=size), options.head)
    found = run(options)
    before, after = (load_head(folder).t2d for folder in (options.head, found.folder))
    added = (after & ~before).nonzero()[:, 0].tolist()
    assert len(added) == found.provenance["data"]["new_draft_tokens"] == 64 // 8
    assert set(added) <= written(target)
    assert int(after.sum()) == 64


def random_ids(tenant: str, count: int) -> list[Captured]:
    draw = random.Random(4)
    return [
        Captured(1020.0, tenant, 0, prompt, [draw.randrange(VOCABULARY) for _ in range(STEPS)], [])
        for prompt in prompts(count, seed=5)
    ]


def test_ids_that_the_target_would_not_write_are_left_out(options: argparse.Namespace):
    write(options.folder, "b", random_ids("mallory", 500))
    found = run(options)
    data = found.provenance["data"]
    assert set(data["tenants"]) == {"alice"}
    assert data["sequences"] >= 45 and data["held_back"] >= 5
    # Of 500 sequences half of a round's tokens was looked at, and nothing of them is used.
    assert 2000 // STEPS <= data["left_out"]["improbable"] <= 80
    assert set(found.provenance["replay"]["tenants"]) <= {"alice"}
    assert found.verdict == CANDIDATE


def test_a_tenant_that_floods_does_not_lower_what_others_gain(
    options: argparse.Namespace, target: FrozenTarget
):
    options.answer_tokens, options.epochs = 4000, 12.0
    write(options.folder, "b", served(target, "mallory", 400, seed=6))
    found = run(options)
    tenants = found.provenance["data"]["tenants"]
    assert tenants["mallory"] <= 2000 + STEPS and tenants["alice"] >= 1500
    assert found.verdict == CANDIDATE, found.provenance["replay"]
    assert found.provenance["replay"]["mix"]["ratio"] > 1.0


def test_what_another_target_wrote_is_not_learned_from(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
):
    lineage = Lineage(options.folder)
    lineage.descend_from("a-target  head")
    assert lineage.descend_from("another-target  head")
    with pytest.raises(ValueError, match="too little can be learned from"):
        run(options)
    work = RoundFolder(options.folder / "work")
    assert work.since() == lineage.target_since() > 1059.0  # and it is not new any more
    replace_json(options.folder / "target_since", 1029.0)  # half of it is the new target's
    monkeypatch.setattr(rounds, "_LEAST_CONVERSATIONS", 0)
    options.epochs = 0.1
    data = run(options).provenance["data"]
    assert data["sequences"] + data["held_back"] == 30


def test_what_teaches_nothing_is_looked_at_once(options: argparse.Namespace):
    """A stream of forged ids must not keep the learner busy for ever."""
    write(options.folder, "a", random_ids("mallory", 60))
    with pytest.raises(ValueError, match=r"too little can be learned from: .*'improbable': 60"):
        run(options)
    work = RoundFolder(options.folder / "work")
    assert work.since() == 1020.0 and work.plan() is None and not work.round.exists()
