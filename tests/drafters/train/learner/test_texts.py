from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from drafters.learning.captured import Captured
from drafters.train.data.mix import save_mix
from drafters.train.data.responses import respond
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.learner import texts as texts_of_a_round
from drafters.train.learner.texts import (
    answer_mark,
    mean_log_probabilities,
    mix_of,
    taken,
    text_of,
    within_prompt_tokens,
)
from drafters.train.target import FrozenTarget
from tests.drafters.train.tiny import VOCABULARY, tokenizer


def texts(count: int = 12) -> list[Text]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 40, (count,), generator=generator).tolist()
    return [
        Text(torch.randint(0, VOCABULARY, (length,), generator=generator), length // 3)
        for length in lengths
    ]


def test_log_probabilities_are_those_of_the_answers_alone(target: FrozenTarget):
    found = mean_log_probabilities(target, Texts.of(texts()))
    for text, mean in zip(texts(), found, strict=True):
        logits = target.model(text.tokens[None]).logits[0].float().log_softmax(-1)
        own = logits[:-1].gather(1, text.tokens[1:, None])[text.prompt - 1 :, 0]
        assert mean == pytest.approx(float(own.mean()), abs=1e-3)


def test_random_ids_are_improbable_and_the_targets_own_words_are_not(target: FrozenTarget):
    own = [text for _, text in respond(target, [[5, 9, 40]], steps=20, temperature=0.0, seed=0)]
    forged, honest = mean_log_probabilities(target, Texts.of([texts()[0], own[0]]))
    assert forged < -4.0 < honest


def test_a_text_is_a_prompt_and_its_answer():
    text = text_of(Captured(0.0, "", 0, [1, 2, 3], [4, 5], []))
    assert text.tokens.tolist() == [1, 2, 3, 4, 5] and text.prompt == 3


def test_prompts_are_bounded_and_each_tenant_keeps_its_newest():
    long = [Captured(float(at), "long", 0, [1] * 400, [2] * 2, []) for at in range(300)]
    short = [Captured(float(at), "short", 0, [1] * 10, [2] * 20, []) for at in range(20)]
    found = within_prompt_tokens(long + short, 10_000)
    assert sum(len(item.prompt) for item in found) <= 10_000
    assert [item.at for item in found if item.tenant == "long"] == list(range(288, 300))
    assert found[12:] == short
    few = within_prompt_tokens(long + short, 1000, least=10)
    assert [item.at for item in few if item.tenant == "long"] == list(range(290, 300))
    assert within_prompt_tokens(long, 400 * 300) == long


def test_the_texts_beside_a_head_are_mixed_in(target: FrozenTarget, tmp_path: Path):
    options = argparse.Namespace(mix=[], head=tmp_path)
    assert mix_of(target, options, seed=1) == []
    save_mix(Texts.of(texts()), tmp_path)
    found = mix_of(target, options, seed=1)
    assert sorted(text.tokens.tolist() for text in found) == sorted(
        text.tokens.tolist() for text in texts()
    )
    assert [text.prompt for text in mix_of(target, options, seed=1)] == [
        text.prompt for text in found
    ]
    assert len(taken(found, 1)) == 1 and len(taken(found, 10**6)) == len(found)


def test_prompts_are_rendered_as_the_gateway_does_and_answered_by_the_target(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target.tokenizer.chat_template = "{{ messages[0].content }} {{ 'x' if thinking else 'y' }}"
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    options = argparse.Namespace(
        mix=[file], head=tmp_path, max_length=300, answer_tokens=10_000, mix_share=0.5,
        chat_template_kwargs={"thinking": True},
    )  # fmt: skip
    with pytest.raises(ValueError, match="no prompt leaves room"):  # of the target's 128 positions
        mix_of(target, options, seed=1)
    monkeypatch.setattr(texts_of_a_round, "_RESPONSE_TOKENS", 8)
    (text,) = mix_of(target, options, seed=1)
    assert target.tokenizer.decode(text.tokens[: text.prompt]) == "hi x"


def test_the_mark_of_an_answer_is_what_the_template_writes_behind_the_last_message():
    marked = tokenizer()
    marked.chat_template = (
        "{% for message in messages %}[{{ message.content }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% if thinks %}?{% endif %}{% endif %}"
    )
    (expected,) = marked(">", add_special_tokens=False)["input_ids"]
    assert answer_mark(marked, {"thinks": True}) == expected
    marked.chat_template = "{{ raise_exception('no') }}"
    assert answer_mark(marked, {}) is None
    assert answer_mark(tokenizer(chat=False), {}) is None
