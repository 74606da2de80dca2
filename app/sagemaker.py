"""Amazon SageMaker's container contract: SM_VLLM_* variables and /opt/ml/model -> settings.

The variables are read as AWS's vLLM container reads them, so that an endpoint keeps its
environment when its image becomes this one. SM_VLLM_FOO_BAR is vLLM's option --foo-bar:

    true or nothing    the bare flag
    false              left out
    a JSON array       one value for each element
    anything else      one value as it stands, a JSON object included

vLLM's own parser types them. Those that name something of the gateway become its settings,
other engine options go to `engine_args`, and what this gateway does not have is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import SettingsError

PREFIX = "SM_VLLM_"
MODEL_FOLDER = Path("/opt/ml/model")
PORT = 8080
DRAIN_S = 20.0  # the platform kills 30 s after SIGTERM

# vLLM's option -> setting, where only the name differs, if that.
_SETTINGS = {
    **{
        name: name
        for name in (
            "model", "revision", "quantization", "trust_remote_code", "chat_template",
            "tool_call_parser", "tool_strict_level", "reasoning_parser", "max_model_len",
            "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
            "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "seed",
            "host", "port",
        )
    },
    "model_tag": "model",
    "sse_keep_alive_interval": "sse_keep_alive_s",
}  # fmt: skip
_DTYPES = {"half": "float16", "float": "float32"}
_LEVELS = {"critical": "error", "trace": "debug"}
# What they ask for is how this gateway is.
_ALWAYS_SO = frozenset({"enable_request_id_headers", "disable_uvicorn_access_log"})

Parse = Callable[[Sequence[str]], dict[str, Any]]  # app.engine.arguments.parse
Names = Callable[[], frozenset[str]]  # app.engine.arguments.engine_argument_names


def hosted(environ: Mapping[str, str], folder: Path = MODEL_FOLDER) -> bool:
    """Whether this process was started by SageMaker, or as if it were."""
    return _artefacts(folder) or any(
        key.startswith((PREFIX, "SAGEMAKER_")) and value for key, value in environ.items()
    )


def settings(
    environ: Mapping[str, str], parse: Parse, names: Names, folder: Path = MODEL_FOLDER
) -> dict[str, Any]:
    """Setting -> value, for the layer below the gateway's own environment variables. Raises
    SettingsError naming the SM_VLLM_ variable."""
    given = _parsed(tokens(environ), parse)
    found: dict[str, Any] = {"host": "0.0.0.0", "port": PORT, "drain_timeout_s": DRAIN_S}
    model, drafter = _models(environ, folder)
    if model is not None:
        found["model"] = model
        found["k"] = 0  # as in AWS's container, nothing is drafted unless it is asked for
    if drafter is not None:
        found["drafter"] = drafter
        del found["k"]
    engine_args: dict[str, Any] = {}
    for option, value in given.items():
        if (setting := _SETTINGS.get(option)) is not None:
            found[setting] = value
        elif option in _SPECIAL:
            found |= _SPECIAL[option](value)
        elif option == "enable_auto_tool_choice":
            if value and "tool_call_parser" not in given:
                raise _refused(option, f"needs {PREFIX}TOOL_CALL_PARSER")
        elif option in names():
            engine_args[option] = value
        elif option not in _ALWAYS_SO:
            raise _refused(option, "is not an option of this gateway; take it out")
    if found.get("max_model_len", 0) == -1:  # vLLM's `auto`
        engine_args["max_model_len"] = found.pop("max_model_len")
    if engine_args:
        found["engine_args"] = engine_args
    if {"AERIE_DRAFTER", "AERIE_K", "AERIE_PRESET"} & set(environ) and found.get("k") == 0:
        del found["k"]
    return found


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
        raise _refused(error.key.removeprefix("--"), problem) from None


def _models(environ: Mapping[str, str], folder: Path) -> tuple[str | None, str | None]:
    """(target, head) where no variable of theirs names them: the artefacts, or HF_MODEL_ID.

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


def _speculation(value: Any) -> dict[str, Any]:
    """vLLM's speculative configuration -> head and K."""
    option = "speculative_config"
    config = json.loads(value) if isinstance(value, str) else dict(value)
    method = config.pop("method", "eagle3")
    parallel = config.pop("parallel_drafting", method == "peagle")
    head, k = config.pop("model", None), config.pop("num_speculative_tokens", None)
    if method not in ("eagle3", "peagle") or not parallel:
        raise _refused(
            option,
            f'{{"method": "{method}", "parallel_drafting": {json.dumps(bool(parallel))}}}: this '
            "gateway drafts in parallel only, with P-EAGLE heads (method eagle3 and "
            "parallel_drafting true)",
        )
    if not head:
        raise _refused(option, "names no model, the head")
    if config:
        raise _refused(option, f"has {', '.join(sorted(config))}: K is chosen at every step here")
    return {"drafter": head} if k is None else {"drafter": head, "k": k}


def _served_name(value: Any) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    if len(names) != 1:
        raise _refused("served_model_name", f"has {len(names)} names, this gateway serves one")
    return {"served_model_name": names[0]}


_SPECIAL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "speculative_config": _speculation,
    "served_model_name": _served_name,
    "dtype": lambda value: {"dtype": _DTYPES.get(value, value)},
    "uvicorn_log_level": lambda value: {"log_level": _LEVELS.get(value, value)},
    "allowed_media_domains": lambda value: {"media_domains": ",".join(value)},
}


def _refused(option: str, problem: str) -> SettingsError:
    return SettingsError(f"{PREFIX}{option.upper().replace('-', '_')}", problem)
