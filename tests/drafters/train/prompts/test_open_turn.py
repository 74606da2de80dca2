"""The open user turn of several families' chat templates, shortened to what matters here."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from drafters.train.prompts.open_turn import OpenTurn, open_turn
from tests.drafters.train.tiny import tokenizer

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ message.content }}{% else %}<|User|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
VICUNA = "{% for message in messages %}USER: {{ message.content }} ASSISTANT:{% endfor %}"
SPECIALS = [
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|User|>", "<|Assistant|>",
]  # fmt: skip


def _tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>", *SPECIALS]})
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "prefix", "end"),
    [
        (CHATML, "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (LLAMA_3, "<s><|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        (GEMMA, "<s><start_of_turn>user\n", "<end_of_turn>"),
        (DEEPSEEK, "<s><|User|>", "<|Assistant|>"),
    ],
    ids=["chatml", "llama 3", "gemma", "deepseek"],
)
def test_the_turn_begins_and_ends_where_the_template_says(
    template: str, prefix: str, end: str
) -> None:
    made = _tokenizer(template)
    assert open_turn(made) == OpenTurn(prefix, end, made.convert_tokens_to_ids(end))


def test_a_turn_may_end_with_text() -> None:
    turn = open_turn(_tokenizer(VICUNA))
    assert turn == OpenTurn("USER: ", "ASSISTANT:", None)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, DEEPSEEK])
def test_a_system_prompt_takes_the_place_of_the_templates(template: str) -> None:
    turn = open_turn(_tokenizer(template), "Ask about code.")
    assert "Ask about code." in turn.prefix
    assert "You help." not in turn.prefix


@pytest.mark.parametrize(
    ("template", "system", "reason"),
    [
        (None, None, "no chat template"),
        (GEMMA, "Ask.", "refuses a system prompt: .*System role not supported"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}!{% endfor %}", "Ask.",
         "leaves the system prompt out"),
        ("{{ messages[0].content }} {{ messages[0].content }}", None, "2 times, not once"),
        ("hello", None, "0 times, not once"),
        ("{{ messages[0].content }}\n", None, "nothing behind"),
    ],
)  # fmt: skip
def test_what_a_template_lacks_is_named(
    template: str | None, system: str | None, reason: str
) -> None:
    made = tokenizer(chat=False) if template is None else _tokenizer(template)
    with pytest.raises(ValueError, match=reason):
        open_turn(made, system)


def test_an_opening_is_encoded_with_the_prefix_and_no_second_begin_token() -> None:
    made = _tokenizer(LLAMA_3)
    turn = open_turn(made)
    ids = turn.encode(made, "Write a")
    assert made.decode(ids) == "<s><|start_header_id|>user<|end_header_id|>\n\nWrite a"
    assert ids.count(made.bos_token_id) == 1


def test_a_space_before_the_first_word_is_left_to_the_word() -> None:
    made = _tokenizer(VICUNA)
    assert made.decode(open_turn(made).encode(made, "")) == "USER:"
    assert made.decode(open_turn(made).encode(made, "Write")) == "USER: Write"
