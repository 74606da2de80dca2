"""Each hook finds in the installed vLLM what it expects, every hook is in the table, and
docs/vllm-hooks.md is the table."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

import drafters.vllm
from docs.vllm_hooks import PAGE, page
from drafters.vllm import hooks, patches
from drafters.vllm.hooks import HOOKS, Hook, broken, parameters

REPOSITORY = Path(__file__).resolve().parents[3]
# Classes of vLLM that ours are mixed into, or stand in front of on one platform.
MIXED_INTO: dict[str, tuple[type, ...]] = {
    "heads:_Corrections": (Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM),
    "v1.runner:V1DraftingRunner": (V1Runner,),
    "v2.runner:V2DraftingRunner": (V2Runner,),
    "worker:DraftingWorker": (CPUWorker,),
}
OF_EVERY_CLASS = vars(type("Any", (), {})).keys() | {"__subclasshook__"}


def test_vllm_has_what_each_hook_expects() -> None:
    """In a process that has not patched it."""
    checked = subprocess.run(
        [sys.executable, "-m", "drafters.vllm.hooks"],
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert "places of vLLM are as expected" in checked.stdout, checked.stderr


def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "broken", lambda: ["json:gone is not there"])
    with pytest.raises(SystemExit, match="json:gone is not there"):
        hooks.main()


@pytest.mark.parametrize(
    ("targets", "fault"),
    [
        ({"json:dumps": "obj"}, r"takes \(obj, \*, skipkeys=, .*\), not \(obj\)"),
        ({"json:JSONDecoder.gone": "self"}, "is not there"),
        ({"json.gone:dumps": "obj"}, "is not there"),
        ({"json:Gone.added": None}, "is not there"),
        ({"json:JSONDecoder.added": None}, None),
        ({"json:JSONDecoder.decode": "self, s, _w="}, None),
    ],
)
def test_a_hook_that_a_new_vllm_breaks_is_named(
    targets: dict[str, str | None], fault: str | None
) -> None:
    found = list(broken([Hook("patches:ours", targets, "why", "until")]))
    if fault is None:
        assert not found
        return
    [text] = found
    assert text.startswith(f"hook patches:ours: vLLM's {next(iter(targets))} ")
    assert re.search(fault, text)


def test_what_is_not_loaded_can_be_left_out() -> None:
    hook = Hook("patches:ours", {"a_module_that_nobody_imported:x": ""}, "why", "until")
    assert list(broken([hook])) and not list(broken([hook], loaded_only=True))


def test_a_start_on_another_vllm_names_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(rejection_sampler, "rejection_sample", lambda: None)
    monkeypatch.setattr(patches, "broken", lambda loaded_only: ["hook a:b: vLLM's c:d is gone"])
    with pytest.raises(RuntimeError, match=r"is needed; hook a:b: vLLM's c:d is gone"):
        patches.apply()
    monkeypatch.setattr(patches, "broken", lambda loaded_only: [])
    monkeypatch.setattr(patches.vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"0\.33\.0 is installed, .* needed; every hook fits it"):
        patches.apply()


def classes() -> Iterator[tuple[str, type]]:
    """Every class of drafters.vllm, with its name as hooks write it."""
    prefix = drafters.vllm.__name__ + "."
    for found in pkgutil.walk_packages(drafters.vllm.__path__, prefix):
        module = importlib.import_module(found.name)
        for name, kind in vars(module).items():
            if isinstance(kind, type) and kind.__module__ == found.name:
                yield f"{found.name.removeprefix(prefix)}:{name}", kind


def overridden(ours: str, kind: type) -> Iterator[tuple[str, str]]:
    """Methods of vLLM that a class overrides: (ours, target), as hooks write them."""
    for base in MIXED_INTO.get(ours, (kind,)):
        for name in vars(kind).keys() - OF_EVERY_CLASS:
            for owner in base.__mro__:
                if name in vars(owner) and owner.__module__.startswith("vllm."):
                    if callable(vars(owner)[name]):
                        yield ours, f"{owner.__module__}:{owner.__name__}.{name}"
                    break


def test_every_overridden_method_is_a_hook() -> None:
    """Catches: a method that a new vLLM renames, whose override is then never called."""
    found = {pair for ours, kind in classes() for pair in overridden(ours, kind)}
    listed = {
        (hook.ours, target) for hook in HOOKS if hook.kind != "patch" for target in hook.targets
    }
    assert listed == found


def patched(tree: ast.AST) -> Iterator[str]:
    """Names of attributes that code assigns to what it imports from vLLM or torch."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            imported |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name in ("torch", "vllm")}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            owner: Any = target
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            known = isinstance(owner, ast.Name) and owner.id in imported
            if isinstance(target, ast.Attribute) and known:
                yield target.attr


def test_every_patch_is_a_hook() -> None:
    found = [
        name
        for path in sorted((REPOSITORY / "drafters").rglob("*.py"))
        for name in patched(ast.parse(path.read_text("utf-8")))
    ]
    listed = [
        target.rpartition(":")[2].rpartition(".")[2]
        for hook in HOOKS
        if hook.kind == "patch"
        for target in hook.targets
    ]
    assert sorted(found) == sorted(listed)
    source = "from vllm.a import b\nimport torch\nb.c = torch.d.e = x.y = 1\n"
    assert list(patched(ast.parse(source))) == ["c", "e"]


def test_what_takes_the_place_of_vllms_is_there() -> None:
    for hook in HOOKS:
        module, _, name = hook.ours.partition(":")
        ours = getattr(importlib.import_module(f"drafters.vllm.{module}"), name)
        assert hook.kind == "patch" or isinstance(ours, type), hook.ours


def test_parameters_are_written_without_types() -> None:
    def example(a: int, /, b: str = "", *, c: int, **rest: int) -> None: ...

    def starred(*every: int, last: int = 1) -> None: ...

    assert parameters(example) == "a, b=, *, c, **rest"
    assert parameters(starred) == "*every, last="


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m docs.vllm_hooks"
