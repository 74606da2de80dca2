"""Amazon SageMaker's container contract: SM_VLLM_* variables and /opt/ml/model -> settings.

The variables are read as AWS's vLLM container reads them, so that an endpoint keeps its
environment when its image becomes this one. SM_VLLM_FOO_BAR is vLLM's option --foo-bar:

    true or nothing    the bare flag
    false              left out
    a JSON array       one value for each element
    anything else      one value as it stands, a JSON object included

vLLM's own parser types them, and app/commands/vllm_options.py says what becomes of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.commands import vllm_options
from app.errors import SettingsError

PREFIX = "SM_VLLM_"
MODEL_FOLDER = Path("/opt/ml/model")
PORT = 8080
DRAIN_S = 20.0  # the platform kills 30 s after SIGTERM

Parse = Callable[[Sequence[str]], dict[str, Any]]  # app.engine.configuration.vllm_cli.parse


def hosted(environ: Mapping[str, str], folder: Path = MODEL_FOLDER) -> bool:
    """Whether this process was started by SageMaker, or as if it were."""
    return _artefacts(folder) or any(
        key.startswith((PREFIX, "SAGEMAKER_")) and value for key, value in environ.items()
    )


def settings(
    environ: Mapping[str, str], parse: Parse, names: vllm_options.Names, folder: Path = MODEL_FOLDER
) -> dict[str, Any]:
    """Setting -> value, for the layer below the gateway's own environment variables. Raises
    SettingsError naming the SM_VLLM_ variable."""
    given = _parsed(tokens(environ), parse)
    found: dict[str, Any] = {"host": "0.0.0.0", "port": PORT, "drain_timeout_s": DRAIN_S}
    model, drafter = _models(environ, folder)
    if model is not None:
        found["model"] = model
    if drafter is not None:
        found["drafter"] = drafter
    return found | vllm_options.settings(given, names, _variable)


def tokens(environ: Mapping[str, str]) -> list[str]:
    """The command line that AWS's container would make of the environment."""
    line: list[str] = []
    for key in sorted(environ):
        if not key.startswith(PREFIX):
            continue
        option = f"--{key.removeprefix(PREFIX).lower().replace('_', '-')}"
        value = environ[key]
        if value.lower() == "false":
            continue
        line.append(option)
        if value and value.lower() != "true":
            line += _elements(value)
    return line


def _elements(value: str) -> list[str]:
    if value.lstrip().startswith("["):
        try:
            array = json.loads(value)
        except ValueError:
            return [value]
        return [item if isinstance(item, str) else json.dumps(item) for item in array]
    return [value]


def _parsed(line: Sequence[str], parse: Parse) -> dict[str, Any]:
    if not line:
        return {}
    try:
        return parse(line)
    except SettingsError as error:
        problem = str(error).partition(": ")[2]
        raise SettingsError(_variable(error.key.removeprefix("--")), problem) from None


def _models(environ: Mapping[str, str], folder: Path) -> tuple[str | None, str | None]:
    """(target, head) by SM_VLLM_MODEL, else from the artefacts, else by HF_MODEL_ID.

    Artefacts are a model's files, or two folders `target` and `drafter`.
    """
    if environ.get(f"{PREFIX}MODEL"):
        return environ[f"{PREFIX}MODEL"], None
    if _artefacts(folder):
        pair = folder / "target", folder / "drafter"
        if (pair[0] / "config.json").exists():
            return str(pair[0]), str(pair[1]) if pair[1].is_dir() else None
        return str(folder), None
    return environ.get("HF_MODEL_ID") or None, None


def _artefacts(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _variable(option: str) -> str:
    return f"{PREFIX}{option.upper().replace('-', '_')}"
