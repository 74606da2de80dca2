"""`aerie bench quality` against a gateway with scripted answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.quality import check_answers
from drafters.train.data.humaneval import Problem
from tests.bench.quality.conftest import StubGateway

NAMES = ("first", "second")
RIGHT, WRONG = (
    "```python\ndef {0}():\n    return 1\n```",
    "```python\ndef {0}():\n    return 2\n```",
)


@pytest.fixture(autouse=True)
def two_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    test = "def check(candidate):\n    assert candidate() == 1\n"
    made = [
        Problem(f"T/{n}", f'def {name}():\n    """One."""\n', "    return 1\n", test, name)
        for n, name in enumerate(NAMES)
    ]
    monkeypatch.setattr(check_answers, "problems", lambda: made)


@pytest.fixture
def agreeing(gateway: StubGateway) -> StubGateway:
    """Both answers to both problems are the same; the second one is wrong."""
    for name, form in zip(NAMES, (RIGHT, WRONG), strict=True):
        gateway.drafted[name] = gateway.plain[name] = (form.format(name), [10, 11, 0])
    return gateway


def run(
    gateway: StubGateway, folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and the last line of the output."""
    out = str(folder / "quality.jsonl")
    code = check_answers.main(["--url", gateway.url, "--out", out, *options])
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1]) if lines else {}


def test_equal_answers_are_counted_and_run(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(agreeing, tmp_path, capsys, "--run-code")
    assert code == 0
    assert (found["problems"], found["equal"], found["failures"]) == (2, 2, 0)
    for side in ("on", "off"):
        assert found["pass_at_1"][side]["outcomes"] == {"passed": 1, "wrong": 1}
    assert found["speculation"]["acceptance_length"] == 2.0
    assert found["provenance"]["command"].startswith("aerie bench quality --url")


def test_each_problem_is_asked_with_drafts_and_without(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(agreeing, tmp_path, capsys, "--max-tokens", "33")
    bodies = [body for _, body in agreeing.bodies]
    assert [body.get("speculation") for body in bodies] == [None, {"enabled": False}] * 2
    # Neither answer is prefilled from what the other one left in the prefix cache.
    assert [body["cache_salt"] for body in bodies] == ["drafts", "no drafts"] * 2
    for body in bodies:
        assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 33, "stub")
        assert body["return_token_ids"] is True


def test_no_code_runs_without_the_option(
    agreeing: StubGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(source: str) -> str:
        raise AssertionError("code was run")

    monkeypatch.setattr(check_answers, "run_program", refused)
    code, found = run(agreeing, tmp_path, capsys)
    assert code == 0
    assert "pass_at_1" not in found


@pytest.mark.parametrize(
    ("scores", "gap", "code"),
    [
        ({11: -0.6931, 12: -0.6932, 13: -9.0}, 0.0001, 0),
        # One step of bfloat16 between 32 and 64, as float32 has it after a softmax.
        ({11: -0.82788, 12: -1.0778800596}, 0.25, 0),
        ({11: -0.82788, 12: -1.0779}, 0.25002, 1),
        ({11: -0.1, 12: -2.4}, 2.3, 1),
        ({11: -0.1, 13: -3.0}, None, 1),
    ],
)
def test_where_answers_part_the_gap_decides(
    agreeing: StubGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    scores: dict[int, float],
    gap: float | None,
    code: int,
) -> None:
    agreeing.drafted["second"] = (RIGHT.format("second"), [10, 12, 0])
    agreeing.scores[1] = scores
    got, found = run(agreeing, tmp_path, capsys, "--run-code")
    assert got == code
    (item,) = found["differing"]
    assert item["task_id"] == "T/1"
    assert (item["position"], item["with_drafts"], item["without_drafts"]) == (1, 12, 11)
    assert item["gap"] == (None if gap is None else pytest.approx(gap))
    assert item["tie"] is (code == 0)
    assert found["pass_at_1"]["on"]["outcomes"] == {"passed": 2}
    assert found["pass_at_1"]["off"]["outcomes"] == {"passed": 1, "wrong": 1}
    drafted, plain = (body for _, body in agreeing.bodies[-2:])
    assert "logprobs" not in drafted
    assert (plain["logprobs"], plain["top_logprobs"] >= 5) == (True, True)


def test_an_answer_that_is_the_others_beginning_is_a_failure(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreeing.drafted["first"] = (RIGHT.format("first"), [10, 11])
    code, found = run(agreeing, tmp_path, capsys)
    assert code == 1
    (item,) = found["differing"]
    assert (item["with_drafts"], item["without_drafts"], item["gap"]) == (None, 0, None)


def test_a_server_that_drafts_nothing_is_no_comparison(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreeing.drafts_per_answer = 0
    for _ in range(2):  # the second run asks nothing, and answers that were not compared stay so
        code, found = run(agreeing, tmp_path, capsys)
        assert (code, found["equal"]) == (1, 2)
    assert len(agreeing.bodies) == 4


def test_drafts_of_one_start_do_not_stand_for_another(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = agreeing.drafted.pop("second")
    agreeing.drafts_per_answer = 0
    assert run(agreeing, tmp_path, capsys) == (1, {})  # the first problem alone has its answers
    agreeing.drafted["second"] = second
    agreeing.drafts_per_answer = 4
    assert (
        check_answers.main(["--url", agreeing.url, "--out", str(tmp_path / "quality.jsonl")]) == 1
    )
    error = capsys.readouterr().err
    assert "the server drafted nothing in 1 of 2 starts" in error


def test_results_without_counters_are_read_as_before(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(agreeing, tmp_path, capsys)
    file = tmp_path / "quality.jsonl"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"kind": "counters"' not in line), "utf-8")
    code, found = run(agreeing, tmp_path, capsys)
    assert (code, found["equal"], found["speculation"]) == (0, 2, None)


def test_a_server_without_counters_is_refused(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agreeing.has_metrics = False
    assert check_answers.main(["--url", agreeing.url, "--out", str(tmp_path / "q.jsonl")]) == 1
    assert "no /metrics" in capsys.readouterr().err


def test_the_same_command_goes_on_where_it_was_stopped(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = agreeing.drafted.pop("second")
    code, found = run(agreeing, tmp_path, capsys)
    assert (code, found) == (1, {})  # the stub has no answer and closes the connection
    agreeing.drafted["second"] = second
    before = len(agreeing.bodies)
    code, found = run(agreeing, tmp_path, capsys)
    assert (code, found["problems"]) == (0, 2)
    assert len(agreeing.bodies) == before + 2  # the first problem is not asked again
    code, found = run(agreeing, tmp_path, capsys)
    assert (code, found["equal"]) == (0, 2)
    # Of both starts that had problems to answer: two problems, four drafts each, all accepted.
    assert found["speculation"] == {"acceptance_length": 2.0, "k_mean": 1.0, "acceptance": []}
    assert len(agreeing.bodies) == before + 2


@pytest.mark.parametrize("method", ["off", "none", "k:3,adaptive", "plain"])
def test_only_a_drafting_method_of_the_gateway_is_compared(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_answers.main(["--method", method, "--out", str(tmp_path / "q.jsonl")]) == 1
    assert "give adaptive or k:K" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(
    agreeing: StubGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "q.jsonl"
    assert check_answers.main(["--url", agreeing.url, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("aerie bench: ") and str(tmp_path / "file") in error
    assert agreeing.bodies == []
