"""A wheel of this tree, installed elsewhere, names what it serves and finds its head."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from app.settings import REPOSITORY, preset_names

pytest.importorskip("setuptools", reason="setuptools is not installed")
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SEES = """
import json
from importlib.resources import files
from app.doctor.pair import check_models
from app.settings import load, preset_names
settings = load({}, {})
print(json.dumps({
    "presets": preset_names(),
    "drafter": settings.speculation.drafter,
    "findings": {each.check: each.status for each in check_models(settings)[0]},
    "typed": [
        name for name in ("app", "bench", "drafters") if (files(name) / "py.typed").is_file()
    ],
}))
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; its dependencies are those here."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # building leaves folders behind
    names = ("app", "bench", "drafters", "models/smollm2-135m")
    for name in names:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = folder / "environment"
    python = environment / "bin" / "python"
    for command in (
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree)],
        [sys.executable, "-m", "venv", "--without-pip", str(environment)],
    ):
        subprocess.run(command, check=True, cwd=folder, env=BARE)
    [wheel] = folder.glob("*.whl")
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", str(wheel)],
        check=True,
        cwd=folder,
        env=BARE,
    )
    return python


@pytest.mark.slow
def test_it_serves_the_default_model_from_anywhere(outside: Path, tmp_path: Path) -> None:
    # Of the path's folders no .pth is read: the checkout is not among them.
    environ = {**BARE, "PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        [str(outside), "-c", SEES], cwd=tmp_path, env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["presets"] == preset_names()
    assert seen["drafter"].startswith(str(outside.parents[1]))
    assert (Path(seen["drafter"]) / "config.json").exists()
    assert "FAIL" not in seen["findings"].values(), seen
    assert seen["findings"]["head"] in ("ok", "warn")
    assert seen["typed"] == ["app", "bench", "drafters"], "type checkers read installed packages"
