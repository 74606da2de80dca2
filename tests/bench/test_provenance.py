"""The commit that results name is that of this source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import provenance


def test_the_commit_of_another_project_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a packed tree, or one without git, inside another project's repository."""
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for line in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run(["git", "-C", str(tmp_path), *line], check=True)
    monkeypatch.setattr(provenance, "_REPOSITORY", tmp_path.resolve())
    assert len(provenance.commit()) >= 7
    inner = tmp_path.resolve() / "aerie"
    inner.mkdir()
    monkeypatch.setattr(provenance, "_REPOSITORY", inner)
    assert provenance.commit() == ""
    (inner / "COMMIT").write_text("1234567\n")
    assert provenance.commit() == "1234567"
