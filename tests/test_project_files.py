"""Version, changelog, continuous integration and hooks say the same as each other; packages are
small, and a class's name means one thing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import FIRST, OWN_GATEWAYS, TIMED

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = sorted(
    module for root in ("app", "bench", "drafters") for module in (REPOSITORY / root).rglob("*.py")
)
MODULES_OF_A_PACKAGE = 12
TEMPLATES = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))


def read(name: str) -> str:
    return (REPOSITORY / name).read_text("utf-8")


def recipe(target: str) -> list[str]:
    """Commands of a target of the Makefile, without make's prefixes."""
    [lines] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    return [line.strip().removeprefix("@") for line in lines.splitlines()]


def test_package_chart_and_changelog_have_one_version() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    chart = yaml.safe_load(read("deploy/helm/aerie/Chart.yaml"))
    newest = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[0]
    assert [chart["version"], chart["appVersion"], newest] == [version] * 3
    # The chart takes the image of that tag, so it is the one to push.
    assert set(re.findall(r"registry\.example/aerie:(\S+)", read("docs/scale.md"))) == {version}


def test_serving_takes_no_host_of_the_shell() -> None:
    """The fault: tcsh exports HOST, the machine's name, and its address was listened on."""
    command = ["make", "--dry-run", "serve", "BACKEND=cpu"]
    environ = {**os.environ, "HOST": "example.test", "PORT": "3000"}
    runs = [
        subprocess.run(
            [*command, *given], cwd=REPOSITORY, env=environ, capture_output=True, text=True
        ).stdout
        for given in ([], ["HOST=::1", "PORT=81"])
    ]
    assert "aerie serve" in runs[0] and "--host" not in runs[0] and "--port" not in runs[0]
    assert "--host ::1 --port 81" in runs[1]


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    sections = re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert sections
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_workflow_runs_what_is_run_here() -> None:
    jobs: dict[str, Any] = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    commands = [step.get("run") for job in jobs.values() for step in job["steps"]]
    assert ".ci/run" in commands
    lines = read(".ci/run").splitlines()
    assert [line for line in lines if line.startswith("make ")] == [
        "make check", 'make test-all ARGS="--ignore tests/test_import_map.py"',
    ]  # fmt: skip
    assert any("tests/test_import_map.py" in command for command in recipe("check"))


def test_the_hooks_are_the_checks() -> None:
    """Each hook's tool is one of `make check`, and the linters and types of it are all hooks."""
    [hooks] = [repo["hooks"] for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]]
    hooked = {tuple(hook["entry"].removeprefix(".venv/bin/").split()[:2]) for hook in hooks}
    checked = {
        tuple(command.removeprefix("$(BIN)/").split()[:2])
        for command in recipe("check")
        if "pytest" not in command
    }
    without_options = {tuple(word for word in each if word[0] != "-") for each in hooked}
    assert without_options == checked


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_issue_forms_are_well_formed(template: Path) -> None:
    form = yaml.safe_load(template.read_text("utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_no_package_has_more_modules_than_one_can_keep_in_mind() -> None:
    counts = Counter(
        str(module.parent.relative_to(REPOSITORY))
        for module in MODULES
        if module.name != "__init__.py"
    )
    assert len(counts) > 20, "no packages found: the roots moved"
    assert {package for package, n in counts.items() if n > MODULES_OF_A_PACKAGE} == set()


def test_no_two_classes_have_one_name() -> None:
    """Of the whole project: one word has one meaning, and an import says which class it is."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in ast.parse(module.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(module.relative_to(REPOSITORY)))
    assert len(homes) > 100, "no classes found: the roots moved"
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_results_and_pictures_are_those_that_a_page_names() -> None:
    """What no page of docs needs is in the history, from where the log says how to get it."""
    docs = REPOSITORY / "docs"
    pages = [REPOSITORY / "README.md", *docs.rglob("*.md")]
    named = "\n".join(page.read_text("utf-8") for page in pages)
    results = [*(REPOSITORY / "bench" / "results").iterdir(), *(docs / "images").iterdir()]
    assert len(results) > 20
    assert {file.name for file in results if file.name not in named} == set()


def test_tests_that_have_a_place_in_the_order_are_there() -> None:
    named = [*FIRST, *TIMED, *OWN_GATEWAYS]
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_the_log_of_measurements_stays_short() -> None:
    assert len(read("bench/LOG.md").splitlines()) <= 300


def test_modules_that_code_and_guides_name_by_their_path_are_there() -> None:
    """Decisions, the changelog and the log name what was there in their time."""
    named = [*MODULES, *sorted((REPOSITORY / "tests").rglob("*.py"))]
    named += sorted((REPOSITORY / "deploy").rglob("*.py")) + sorted(REPOSITORY.glob("docs/*.md"))
    named += [REPOSITORY / name for name in ("Makefile", "README.md", "CONTRIBUTING.md")]
    named.remove(REPOSITORY / "tests" / "test_import_map.py")  # has modules that may not be
    path = re.compile(r"(?<![\w./])(?:app|bench|deploy|drafters|tests)/(?:[\w-]+/)*[\w-]+\.py\b")
    missing = {
        (str(file.relative_to(REPOSITORY)), name)
        for file in named
        for name in path.findall(file.read_text("utf-8"))
        if not (REPOSITORY / name).is_file()
    }
    assert missing == set()
