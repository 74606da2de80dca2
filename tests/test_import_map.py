"""The import map: which package may import which, so that imports run one way.

A package or module that is named below is a layer. A file belongs to the layer with the longest
name that prefixes its module's. Within a layer everything may import everything.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("app", "bench", "drafters")

# Layer -> the layers it may import. `app` and `drafters` alone are the bare packages.
POLICY = {"drafters.config", "drafters.control"}
TARGET_FOLDERS = {"drafters.packaged"}  # names of targets -> folders
# Heads as their files describe them: no torch.
HEAD_CONFIG = {
    f"drafters.model.{name}" for name in ("config", "head_check", "rope_scaling", "weight_files")
}
HEAD_FILES = HEAD_CONFIG | {"drafters.model.head_values"}  # torch for its own files only
BASE = {"app", "app.background", "app.errors", "app.observability", "app.settings"}
# How much JSON a text holds, and where work on it runs.
SIZED = {"app.json_structure", "app.offload"}
USAGE = {"app.request_usage"}  # what a request used of the engine; set above, counted below
CONFIGURATION = {"app.engine.configuration"}
# The engine and what lies below it.
ENGINE = CONFIGURATION | {
    *("app.engine", "app.learning", "app.llm", "app.serving", "app.validation")
}
HTTP = {"app.http", "app.http.body"}
MEASURING = {f"bench.{part}" for part in ("load", "options", "provenance", "systems", "workloads")}
MEASURING |= {"bench.errors", "bench.parser", "drafters.markdown", "drafters.train.number_options"}
# Training, from what it reads to what it writes; `drafters.train` itself has the commands.
OPTIONS = {
    f"drafters.train.{part}" for part in ("head_option", "number_options", "template_option")
}
RUN = {f"drafters.train.{part}" for part in ("progress", "provenance", "runtime")} | OPTIONS
TRAINING = {
    f"drafters.train.{part}"
    for part in ("target", "data", "optimisation", "embedded", "evaluation", "prompts")
} | RUN
# Of the learner, what paces its child and waits for data: no torch.
LEARNER_PARENT = {
    f"drafters.train.learner.{part}"
    for part in ("child", "options", "pacing", "parent", "round_folder", "sequences")
}
# What runs inside of the engine's processes; `drafters.vllm` itself puts it there.
SERVING = {
    f"drafters.vllm.{part}"
    for part in (
        *("cpu_matmul", "own_drafter", "path_selector"),
        *("verification", "scheduling", "v1", "v2"),
    )
}
SINGLE_PARTS = (
    BASE
    | ENGINE
    | POLICY
    | TARGET_FOLDERS
    | HEAD_FILES
    | {
        "drafters.graph_sizes",
        "drafters.learning",
        "drafters.lookup",
        "drafters.model",
        "drafters.ops",
        "drafters.train",
        "drafters.vllm",
    }
    | TRAINING
    | SERVING
)
MAP: dict[str, set[str]] = {
    "app": set(),
    "app.errors": {"app"},
    "app.json_structure": set(),
    "app.offload": set(),
    "app.request_usage": set(),
    "app.observability": {"app", "app.errors", "drafters.log_records"} | POLICY,
    "app.background": {"app", "app.observability"},
    "app.settings": {"app", "app.errors"} | POLICY,
    "app.validation": BASE | SIZED | POLICY | {"drafters.vllm.worker_bounds"},
    "app.learning": BASE | TARGET_FOLDERS | {"drafters.learning"},
    "app.llm": BASE
    | POLICY
    | USAGE
    | {"app.learning", "app.validation", "drafters.learning"}
    | {"drafters.vllm.own_drafter", "drafters.vllm.worker_bounds"},
    "app.declaration": BASE | {"app.validation"},
    "app.serving": BASE | SIZED | USAGE | {"app.declaration", "app.llm", "app.validation"},
    "app.serving.classes": USAGE | {"app.llm", "app.serving", "app.validation"},
    "app.endpoints": BASE
    | USAGE
    | {"app.declaration", "app.llm", "app.serving", "app.serving.classes", "app.validation"},
    "app.engine.configuration": {
        *("app", "app.errors", "app.settings", "drafters.vllm.cpu_matmul"),
        *("drafters.machine", "drafters.config", "drafters.graph_sizes"),
        *HEAD_CONFIG,
    },
    "app.engine": BASE
    | CONFIGURATION
    | POLICY
    | TARGET_FOLDERS
    | {"app.endpoints", "app.learning", "app.llm", "app.serving", "drafters.parent_death"}
    | {"drafters.learning", "drafters.machine", "drafters.small_samples"}
    # The gateway patches vLLM anew for each engine that it configures, and reads what ended one.
    | {"drafters.vllm", "drafters.vllm.error_report", "drafters.vllm.own_drafter"},
    "app.admission": BASE | POLICY | {"drafters.loopback"},
    "app.http": BASE | USAGE | {"app.admission", "app.declaration", "app.validation"},
    "app.http.body": {"app.errors", "app.settings"} | SIZED,
    "app.routes": BASE
    | CONFIGURATION
    | HTTP
    | SIZED
    | {"app.admission", "app.declaration", "app.endpoints", "app.engine", "app.validation"},
    "app.page": BASE | {"app.admission", "app.engine", "app.http"},
    "app.main": BASE
    | CONFIGURATION
    | {"app.admission", "app.declaration", "app.endpoints", "app.engine"}
    | {"app.http", "app.learning", "app.page", "app.routes"},
    "app.server": BASE | {"app.engine", "app.main", "drafters.streams"},
    "app.presets": BASE | CONFIGURATION | POLICY | HEAD_CONFIG,
    "app.doctor": BASE
    | CONFIGURATION
    | {"app.admission", "app.learning", "app.presets"}
    | TARGET_FOLDERS
    | HEAD_FILES,
    "app.commands": BASE
    | {"app.admission", "app.doctor", "app.presets", "drafters.learning", "drafters.markdown"},
    "app.cli": BASE
    | CONFIGURATION
    | {"app.commands", "app.doctor", "app.server", "drafters.parent_death", "drafters.streams"},
    # Measurements look at much, and nothing looks at them; the load generator knows nobody.
    "bench": set(),
    "bench.errors": {"app.errors"},
    "bench.parser": set(),
    "bench.provenance": {"drafters.machine"},
    "bench.load": {"drafters.parent_death", "drafters.small_samples"},
    "bench.workloads": {"bench.errors", "bench.load"}
    | {"drafters.train.data", "drafters.train.embedded"},
    "bench.systems": {"bench.load", "bench.provenance", "bench.simulate.curve"}
    | {"drafters.parent_death", *HEAD_CONFIG}
    | BASE
    | ENGINE
    | POLICY
    | TARGET_FOLDERS,
    "bench.options": {"bench.workloads", "drafters.train.number_options"} | BASE,
    "bench.sweep": MEASURING | {"bench"} | BASE,
    "bench.trace": MEASURING | {"bench", "bench.sweep"} | BASE,
    "bench.served": MEASURING | {"bench", "bench.sweep"} | BASE,
    "bench.quality": MEASURING | {"bench", "bench.sweep", "drafters.train.data"} | BASE,
    "bench.kernels": SINGLE_PARTS | MEASURING,
    "bench.parts": SINGLE_PARTS | MEASURING | {"app.presets", "bench", "bench.sweep"},
    "bench.gpu_check": SINGLE_PARTS | MEASURING | {"bench.parts", "bench.sweep"},
    "bench.cli": {"bench.gpu_check", "bench.systems"}
    | BASE
    | {f"bench.{part}" for part in ("kernels", "parts", "quality", "served", "sweep", "trace")},
    "bench.simulate": {"bench.errors", "bench.simulate.curve", "bench.sweep"}
    | {"drafters.markdown", "drafters.small_samples", "drafters.train.number_options"}
    | ENGINE
    | POLICY,
    "bench.simulate.curve": set(),
    "drafters": set(),
    "drafters.config": set(),
    "drafters.control": {"drafters.config"},
    "drafters.learning": set(),
    "drafters.lookup": POLICY,
    "drafters.gguf_conversion": set(),
    "drafters.graph_sizes": set(),
    "drafters.log_records": set(),
    "drafters.loopback": set(),
    "drafters.machine": set(),
    "drafters.markdown": set(),
    "drafters.ops": set(),
    "drafters.packaged": set(),
    "drafters.parent_death": set(),
    "drafters.small_samples": set(),
    "drafters.streams": set(),
    "drafters.tensor_files": set(),
    "drafters.model": HEAD_FILES | {"drafters.tensor_files"},
    "drafters.model.config": {"drafters.model.rope_scaling"},
    "drafters.model.head_check": {"drafters.model.config", "drafters.model.weight_files"},
    "drafters.model.head_values": HEAD_CONFIG,
    "drafters.model.weight_files": set(),
    "drafters.model.rope_scaling": set(),
    **{layer: set() for layer in RUN},
    "drafters.train.target": {"drafters.packaged", "drafters.train.runtime"},
    "drafters.train.data": {"drafters.loopback", "drafters.tensor_files", "drafters.train.target"},
    "drafters.train.optimisation": {"drafters.model", "drafters.train.data"}
    | {"drafters.train.target"}
    | HEAD_FILES
    | RUN,
    "drafters.train.embedded": {"drafters.train.optimisation"} | RUN,
    "drafters.train.evaluation": {"drafters.markdown", "drafters.model", "drafters.small_samples"}
    | {"drafters.train.target"}
    | {f"drafters.train.{layer}" for layer in ("data", "embedded", "optimisation")}
    | HEAD_FILES
    | RUN,
    "drafters.train.prompts": {"drafters.packaged", "drafters.train.data", "drafters.train.target"}
    | RUN,
    "drafters.train.learner": {"drafters.learning", "drafters.model", "drafters.train.data"}
    | {f"drafters.train.{layer}" for layer in ("evaluation", "optimisation", "target")}
    | LEARNER_PARENT
    | RUN,
    **{layer: {"drafters.learning"} for layer in LEARNER_PARENT},
    "drafters.train.learner.options": {"drafters.train.learner.pacing"} | OPTIONS,
    "drafters.train.learner.parent": {
        "drafters.learning",
        "drafters.parent_death",
        "drafters.streams",
    }
    | {f"drafters.train.learner.{part}" for part in ("options", "pacing", "round_folder")},
    "drafters.train.learner.child": {
        "drafters.learning",
        "drafters.parent_death",
        "drafters.streams",
    }
    | {
        f"drafters.train.learner.{part}"
        for part in ("options", "parent", "round_folder", "sequences")
    },
    # Training a head further has the learner's rates.
    "drafters.train": {"drafters.model"} | TARGET_FOLDERS | TRAINING | HEAD_CONFIG,
    "drafters.vllm.cpu_matmul": set(),
    "drafters.vllm.error_report": set(),
    "drafters.vllm.own_drafter": {"drafters.config", "drafters.ops"},
    "drafters.vllm.worker_bounds": set(),
    "drafters.vllm.path_selector": {"drafters.model"} | HEAD_FILES,
    "drafters.vllm.verification": {"drafters.ops"},
    # A worker's step tells the scheduler what it took, in the scheduler's own terms.
    "drafters.vllm.scheduling": {"drafters.vllm.own_drafter"} | POLICY,
    "drafters.vllm.v1": {"drafters.lookup", "drafters.ops"}
    | POLICY
    | SERVING - {"drafters.vllm.v1", "drafters.vllm.v2"},
    "drafters.vllm.v2": {"drafters.config", "drafters.graph_sizes", "drafters.ops"}
    | {"drafters.model"}
    | SERVING - {"drafters.vllm.v1", "drafters.vllm.v2"},
    # Reads heads as a start does, and exchanges what both runners have loaded.
    "drafters.vllm.head_swap": {"drafters.model", "drafters.vllm.path_selector", "drafters.vllm.v1"}
    | HEAD_FILES,
    "drafters.vllm": {"drafters.machine", "drafters.config", "drafters.log_records"}
    | {"drafters.parent_death", "drafters.streams", "drafters.vllm.error_report"}
    | {"drafters.vllm.head_swap"}
    | SERVING,
}

# Commands that need no gateway: the only way from app/ into training and simulation, and only
# inside a function, so that no other command pays for the import.
LAZY_HOOKS = {
    "app.cli": {
        "bench.cli",
        "bench.simulate.replay_tables",
        "drafters.train.evaluation.evaluate_head",
        "drafters.train.learner.parent",
        "drafters.train.prompts.generate_prompts",
        "drafters.train.train_head",
    },
    # Waits for data without torch, for hours, and then makes use of them.
    "drafters.train.learner.child": {"drafters.train.learner.round"},
}

# Heavy packages -> the only layers that may import them.
GUARDED = {
    "vllm": {
        *("app.endpoints", "app.engine", "app.engine.configuration", "app.llm"),
        *("app.serving", "app.serving.classes"),
        *("bench.gpu_check", "bench.kernels", "bench.parts"),
        "drafters.vllm",
        "drafters.vllm.head_swap",
        *SERVING,
    },
    "torch": {
        *("app.engine", "app.engine.configuration"),
        *("bench.gpu_check", "bench.kernels", "bench.parts"),
        "drafters.gguf_conversion",
        "drafters.model",
        "drafters.model.head_values",
        "drafters.ops",
        "drafters.tensor_files",
        "drafters.train",
        "drafters.train.learner",
        *TRAINING,
        "drafters.vllm",
        "drafters.vllm.head_swap",
        *SERVING,
    },
}

# Layers that run anywhere: nothing outside the standard library.
STANDARD_LIBRARY_ONLY = {
    *("drafters.config", "drafters.control", "drafters.loopback", "drafters.machine"),
    *("drafters.packaged", "drafters.parent_death", "drafters.small_samples"),
    "drafters.train.template_option",
    *("drafters.vllm.error_report", "drafters.vllm.worker_bounds"),
    *HEAD_CONFIG,
    *LEARNER_PARENT,
}


def layer_of(module: str) -> str:
    """The longest name of a layer that `module` lies in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        # A bare package is the layer of its __init__ alone, never of a module nobody placed.
        if name in MAP and (length > 1 or len(parts) == 1):
            return name
    raise LookupError(f"{module} lies in no layer of the import map")


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module, inside a function) of each import, type-checking ones too."""
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                # `from app import settings` imports a module, `from app.errors import X` a name.
                name = f"{base}.{alias.name}"
                yield node.lineno, name if name in MAP else base, id(node) in lazy


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one file; `path` is relative to the repository."""
    parts = Path(path).with_suffix("").parts
    package = ".".join(parts[:-1])
    module = package if parts[-1] == "__init__" else ".".join(parts)
    try:
        layer = layer_of(module)
    except LookupError as error:
        return [f"{path}: {error}"]
    found = []
    for line, target, lazy in imports(ast.parse(source), package):
        where, top = f"{path}:{line}: {layer} imports {target}", target.split(".")[0]
        if top in ROOTS:
            if target in LAZY_HOOKS.get(module, ()):
                if not lazy:
                    found.append(f"{where}, allowed inside a function only")
                continue
            try:
                owner = layer_of(target)
            except LookupError as error:
                found.append(f"{where}: {error}")
                continue
            if owner != layer and owner not in MAP[layer]:
                found.append(where)
        elif layer in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
            found.append(f"{where}, not in the standard library")
        elif top in GUARDED and layer not in GUARDED[top]:
            found.append(where)
    return found


def test_every_file_keeps_to_the_map() -> None:
    files = [file for root in ROOTS for file in sorted((REPOSITORY / root).rglob("*.py"))]
    assert files, "no source found: the roots moved"
    assert not [
        problem
        for file in files
        for problem in violations(str(file.relative_to(REPOSITORY)), file.read_text("utf-8"))
    ]


def test_a_check_of_a_gpu_begins_without_any_package() -> None:
    """It unpacks the packages that all else needs (bench/gpu_check/offline.py)."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import bench.gpu_check.check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without __init__.py is left out of a wheel."""
    folders = {file.parent for root in ROOTS for file in (REPOSITORY / root).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_map_has_no_cycle() -> None:
    """A cycle would make "one way" empty words."""
    done: set[str] = set()
    while ready := [layer for layer in MAP if layer not in done and MAP[layer] <= done]:
        done.update(ready)
    assert done == set(MAP)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        # Each way to name a module of another layer.
        ("app/settings/tree.py", "from app.main import create_app"),
        ("app/settings/tree.py", "from app import main"),
        ("app/llm/async_llm.py", "from ..serving import operation"),
        ("app/serving/adapter.py", "from app.serving.classes.chat import ChatServing"),
        ("app/engine/supervisor.py", "import app.routes.health"),
        ("app/engine/configuration/options.py", "from app.engine import launch"),  # its parent
        ("app/http/body/limits.py", "from app.http import auth"),
        ("drafters/vllm/v2/runner.py", "from drafters.vllm.v1.runner import V1DraftingRunner"),
        ("drafters/ops/reference.py", "from app import __version__"),
        # Heavy packages, at any place in a file.
        ("app/routes/health.py", "import vllm.outputs"),
        ("app/validation/fields.py", "def late():\n    import vllm"),
        ("drafters/train/train_head.py", "if TYPE_CHECKING:\n    from vllm import LLM"),
        # Nothing but the standard library.
        ("drafters/control/policy.py", "import numpy"),
        ("drafters/packaged.py", "def late():\n    import gguf"),
        # A lazy hook that is not lazy, of another command, and of another module.
        ("app/cli.py", "from drafters.train.train_head import main"),
        ("app/cli.py", "def f():\n    from drafters.train.optimisation.loop import main"),
        ("app/main.py", "def f():\n    from drafters.train.train_head import main"),
        # In no layer.
        ("app/utils.py", "import os"),
    ],
)
def test_a_file_off_the_map_is_caught(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("app/__init__.py", "import importlib.metadata"),
        ("app/llm/async_llm.py", "from .steps import StepWatch\nfrom vllm import outputs"),
        ("app/engine/launch.py", "from .configuration.options import V2"),
        ("app/routes/health.py", "from app.engine import supervisor\nfrom app import __version__"),
        ("app/cli.py", "def f():\n    from drafters.train.train_head import main"),
        ("drafters/control/policy.py", "from drafters.control.cost import Cost\nimport math"),
        ("drafters/vllm/patches.py", "import vllm.version\nfrom drafters.vllm.v1 import runner"),
    ],
)
def test_a_file_on_the_map_passes(path: str, source: str) -> None:
    assert violations(path, source) == []
