"""Pages keep together: links lead somewhere, pages that code names are there, terms are linked."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
GLOSSARY = DOCS / "glossary.md"
PAGES = sorted(
    page
    for pattern in ("*.md", "app/**/*.md", "bench/*.md", "docs/**/*.md", "models/*.md")
    for page in REPOSITORY.glob(pattern)
) + sorted(REPOSITORY.glob("models/*/**/*.md"))
SOURCES = [
    REPOSITORY / name for name in ("Dockerfile", "Makefile", "docker-compose.yml", ".env.example")
] + sorted(
    source
    for folder in ("app", "bench", "deploy", "drafters", "tests")
    for ending in ("py", "toml", "yml", "yaml", "md", "tpl")
    for source in (REPOSITORY / folder).rglob(f"*.{ending}")
    if "node_modules" not in source.parts
)
GUIDES = [
    page for page in sorted(DOCS.glob("*.md")) if page.name not in {"README.md", "glossary.md"}
]
PROSE = [REPOSITORY / page for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    DOCS.rglob("*.md")
)
COLUMNS = 100
HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,8}\b")  # with letters and digits
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)(?: \"[^\"]*\")?\)")
# Words of prose -> the heading of the glossary that defines them.
TERMS = {
    r"targets?\b": "target",
    r"draft heads?\b": "draft-head",
    r"K\b": "k",
    r"acceptance lengths?\b": "acceptance-length",
    r"TTFT\b": "ttft",
    r"TPOT\b": "tpot",
    r"goodput\b": "goodput",
}


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def outside_code(text: str) -> Iterator[tuple[int, str]]:
    """Line number and line, of lines that lie in no code block."""
    fence, in_paragraph = "", False
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif mark:
            fence, in_paragraph = mark[1], False
        elif in_paragraph or not line.startswith("    "):
            # Indented code cannot interrupt a paragraph: such a line goes on with a list's item.
            in_paragraph = bool(line.strip()) and not line.startswith("#")
            yield number, line


def anchors(page: Path) -> set[str]:
    """What a link can point to within a page, as GitHub names headings."""
    seen: Counter[str] = Counter()
    found = set()
    for _, line in outside_code(page.read_text("utf-8")):
        if heading := re.match(r"#{1,6} +(.+?) *#*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        found |= set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line))
    return found


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Number of the first line, and the lines, of what stands between blank lines or code."""
    start, lines = 0, list[str]()
    for number, line in [*outside_code(text), (0, "")]:
        if lines and (not line.strip() or number != start + len(lines)):
            yield start, "\n".join(lines)
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line)


def without_code(text: str) -> str:
    """A paragraph without its code spans."""
    return re.sub(r"(`+)(?:(?!\1).)+?\1(?!`)", "", text, flags=re.DOTALL)


def width(line: str) -> int:
    """Columns of a line, without where its links lead."""
    return len(re.sub(r"\]\([^)]*\)|https?://\S+", "", line))


def dead(page: Path) -> list[str]:
    """Links of a page to nothing, within this repository."""
    lost = []
    for number, text in paragraphs(page.read_text("utf-8")):
        for link in LINK.findall(without_code(text)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists() or not there.is_relative_to(REPOSITORY):
                lost.append(f"{name(page)}:{number}: {link}: there is no such file")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                lost.append(f"{name(page)}:{number}: {link}: there is no such heading")
    return lost


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead(page)


def test_dead_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, heading, heading of this page, across lines; code and its headings do not count."""
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / "other.md").write_text("# One `two`: three\n\n## Again\n\n## Again\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n\n[a](other.md#one-two-three) [b](other.md#again-1) [c](#here) [d](missing.md)\n"
        "[e over\nlines](other.md#again-2) [f](#in-code) `[g](code.md)` [h](https://example.org/x)\n\n"
        "```sh\n# In code\n[i](missing.md)\n```\n"
    )
    assert [text.split(": ")[1] for text in dead(page)] == [
        "missing.md",
        "other.md#again-2",
        "#in-code",
    ]


def test_pages_that_sources_name_are_there() -> None:
    """A page, with or without a heading, and a decision by its number alone."""
    lost = []
    for source in SOURCES:
        text = source.read_text("utf-8")
        for page, anchor in re.findall(r"\bdocs/([\w./-]+\.md)(?:#([\w-]+))?", text):
            if not (DOCS / page).exists() or (anchor and anchor not in anchors(DOCS / page)):
                lost.append(f"{name(source)}: docs/{page}#{anchor}")
        for number in re.findall(r"\bdocs/decisions/(\d{4})", text):
            if not list((DOCS / "decisions").glob(f"{number}-*.md")):
                lost.append(f"{name(source)}: docs/decisions/{number}")
    assert not lost


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_lines_wrap(page: Path) -> None:
    """Tables, code and the destinations of links aside."""
    wide = [
        f"{name(page)}:{number}: {width(line)} columns"
        for number, line in outside_code(page.read_text("utf-8"))
        if not line.startswith("|") and width(line) > COLUMNS
    ]
    assert not wide


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text("utf-8").splitlines()) <= 150


def test_every_page_is_in_the_index() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text("utf-8")))
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages <= {link.partition("#")[0] for link in linked}


def test_contributing_names_every_page_that_is_generated() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    modules = sorted(module.stem for module in DOCS.glob("*.py"))
    assert modules
    for module in modules:
        assert f"`docs/{module.replace('_', '-')}.md`" in text
        assert f"`python -m docs.{module}`" in text


def test_each_term_stands_alone() -> None:
    """Every heading of the glossary has a definition of one to four sentences."""
    parts = re.split(r"^### (.+)$", GLOSSARY.read_text("utf-8"), flags=re.MULTILINE)[1:]
    for term, text in zip(parts[::2], parts[1::2], strict=True):
        definition = re.split(r"^## ", text, flags=re.MULTILINE)[0].strip()
        sentences = re.findall(r"[.)](?:\s|$)", definition)
        assert definition.endswith("."), term
        assert 1 <= len(sentences) <= 5, term
    assert set(TERMS.values()) <= anchors(GLOSSARY)


@pytest.mark.parametrize("page", [REPOSITORY / "README.md", *GUIDES], ids=name)
def test_a_page_links_the_terms_that_it_uses(page: Path) -> None:
    """Tables and headings aside, a page that uses a term says where it is defined."""
    prose = "\n\n".join(
        without_code(text)
        for _, text in paragraphs(page.read_text("utf-8"))
        if not text.startswith(("|", "#"))
    )
    links = set(LINK.findall(prose))
    words = LINK.sub("", prose)
    for word, anchor in TERMS.items():
        if re.search(rf"(?<![\w-]){word}", words):
            assert any(link.endswith(f"glossary.md#{anchor}") for link in links), anchor


DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
FORM = ["Context", "Decision", "Consequences", "Alternatives rejected"]


def test_decisions_are_numbered_one_by_one() -> None:
    numbers = [int(page.name[:4]) for page in DECISIONS]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_a_decision_has_its_form_and_its_row(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.startswith(f"# {page.name[:4]}: ")
    headings = [line[3:] for _, line in outside_code(text) if line.startswith("## ")]
    assert headings in (FORM, FORM[:3])
    [row] = [
        line
        for line in (DOCS / "decisions" / "README.md").read_text("utf-8").splitlines()
        if line.startswith(f"| [{page.name[:4]}]({page.name}) |")
    ]
    by = re.search(r"^Superseded by (\[\d{4}\]\([\w.-]+\))", text, re.MULTILINE)
    assert row.endswith(f"| superseded by {by[1]} |" if by else "| in force |")


WITHOUT_DRAFTS = re.compile(
    r"(?:--k|AERIE_K)[= ]0\b[^.\n]{0,40}\b(?:no|without a|lacks a) head", re.I
)


@pytest.mark.parametrize("page", [*PROSE, REPOSITORY / ".env.example"], ids=name)
def test_no_page_switches_lookups_off_where_a_model_has_no_head(page: Path) -> None:
    """K = 0 means no drafts of any source; a model without a head drafts by lookup."""
    assert not WITHOUT_DRAFTS.search(page.read_text("utf-8"))


def test_every_commit_that_a_figure_names_is_in_the_history() -> None:
    """The fault: figures named commits that had been joined into one before they were published."""
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if shallow.stdout.strip() != "false":
        pytest.skip("no git, or a clone without its history")
    pages = (REPOSITORY / "bench" / "LOG.md", *(DOCS / "decisions").glob("*.md"))
    named = {hash for page in pages for hash in HASH.findall(page.read_text("utf-8"))}
    assert named
    known = subprocess.run(
        ["git", "cat-file", "--batch-check"],
        cwd=REPOSITORY, input="\n".join(sorted(named)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not [line for line in known.stdout.splitlines() if " commit " not in line]
