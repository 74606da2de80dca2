"""The sources of settings: command line, environment, platform, file, preset."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.errors import SettingsError
from app.settings.service_links import is_service_link
from app.settings.tree import Settings, section_of, sections
from drafters.control.objective import FIXED, ObjectiveError

ENV_PREFIX = "AERIE_"
PRESETS = Path(__file__).resolve().parents[1] / "presets"
YAML = (".yaml", ".yml")
REPOSITORY = Path(__file__).resolve().parents[2]
# Where a wheel puts what of `models` it carries (pyproject.toml, data-files).
INSTALLED = Path(sys.prefix) / "share" / "aerie"


def load(
    cli: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    config_file: str | None = None,
    preset: str | None = None,
    container: Mapping[str, Any] | None = None,
    read_yaml: Callable[[str], Mapping[str, Any]] | None = None,
) -> Settings:
    """Merge the sources into one validated tree.

    `cli` has the values that were given. `read_yaml` reads a file of vLLM's options
    (app/commands/vllm_options.py), which `config_file` may be instead of TOML. `container` has the
    values of a hosting platform's own variables (app/commands/sagemaker.py), which override a file
    and yield to AERIE_ variables.
    Raises SettingsError, naming the key and its source, for anything unknown or invalid.
    """
    env = dict(_from_environ(environ))
    of_environ = {name: env.pop(name, None) for name in ("config", "preset")}
    config_file = config_file or of_environ["config"]
    if config_file and read_yaml is not None and config_file.endswith(YAML):
        file_values = dict(read_yaml(config_file))
    else:
        file_values = _from_toml(Path(config_file)) if config_file else {}
    of_file = file_values.pop("preset", None)
    preset = preset or of_environ["preset"] or of_file

    layers = [
        ("preset", {}),
        (str(config_file), file_values),
        ("SM_VLLM_ variables", dict(container or {})),
        ("environment", env),
        ("command line", dict(cli)),
    ]
    if preset is None and not any(values.get("model") for _, values in layers):
        preset = "smollm2-135m"
    is_asked = any({"k", "drafter"} & values.keys() for _, values in layers)
    if preset is not None:
        layers[0] = (f"preset {preset}", read_preset(preset)[0])
    elif container and "model" in container and not is_asked:
        # As in the platform's own container, nothing is drafted unless it is asked for.
        layers[0] = ("platform", {"k": 0})
    return _check(_with_hashed_key(_merge(layers)))


def of_preset(name: str) -> Settings:
    """The settings of a preset alone, unchecked: its head may be missing."""
    return _merge([(f"preset {name}", read_preset(name)[0])])


def _merge(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Settings:
    """Merge layers of (source, setting -> value), in rising order of precedence, into the tree."""
    merged: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origin: dict[str, str] = {}
    homes = section_of()
    for source, values in layers:
        for name, value in values.items():
            section = merged[homes[name]]
            section[name] = _joined(section.get(name), value) if name == "engine_args" else value
            origin[name] = source
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise _explain(error, origin) from None


def _joined(lower: Any, higher: Any) -> Any:
    """Engine arguments of two sources: the higher one wins for each name that both have."""
    try:
        values = [json.loads(each) if isinstance(each, str) else each for each in (lower, higher)]
        return {**(values[0] or {}), **values[1]}
    except (TypeError, ValueError):
        return higher  # not an object: the setting's own check says so


def _with_hashed_key(settings: Settings) -> Settings:
    """Replace `api_key` by an equivalent keys file (app/admission/tenants.py).

    Of the key itself only the hash stays in the settings.
    """
    admission = settings.admission
    if admission.api_key is None:
        return settings
    if admission.keys_file is not None or admission.keys is not None:
        raise SettingsError("api_key", "give either this, or keys, or keys_file")
    digest = hashlib.sha256(admission.api_key.encode()).hexdigest()
    keys = f"""
        [tenants.default]
        [[keys]]
        id = "default"
        tenant = "default"
        sha256 = "{digest}"
    """
    hashed = admission.model_copy(update={"api_key": None, "keys": keys})
    return settings.model_copy(update={"admission": hashed})


def _check(settings: Settings) -> Settings:
    """Refuse settings that contradict each other."""
    if settings.admission.keys_file is not None and settings.admission.keys is not None:
        raise SettingsError("keys", "give either this or keys_file, not both")
    if settings.speculates and not settings.has_head:
        _check_without_head(settings)
    if settings.learning.learn is not None and not settings.has_head:
        raise SettingsError(
            "learn",
            "there is no draft head that could learn: pass --drafter FOLDER and a --k above 0",
        )
    if settings.learning.learn is not None and settings.learning.learn_train:
        _check_learner(settings)
    try:
        settings.speculation.aim()
    except ObjectiveError as error:
        raise SettingsError(error.field, error.problem) from None
    return settings


def _check_learner(settings: Settings) -> None:
    """Refuse targets that the learner, which runs them with transformers, would not have alike."""
    for name in ("quantization", "trust_remote_code"):
        if getattr(settings.model, name):
            problem = (
                f"a head does not learn beside a gateway with {name}: --no-learn-train captures"
            )
            raise SettingsError("learn", problem)


def _check_without_head(settings: Settings) -> None:
    """Refuse what cannot be had without a draft head."""
    speculation, without = settings.speculation, f"no head is given for {settings.model.model}"
    if not speculation.lookup_k:
        raise SettingsError(
            "lookup_k",
            f"{without}, and lookup is off: pass --drafter FOLDER, a --lookup-k above 0, or --k 0 "
            "to serve without speculation",
        )
    if speculation.objective == FIXED:
        raise SettingsError(
            "objective", f"{without}, and a fixed K is a head's: lookup drafts where a text repeats"
        )


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    homes, values = section_of(), {}
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or is_service_link(key, text):
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name not in homes and name not in ("config", "preset"):
            raise SettingsError(key, "unknown setting in the environment")
        values[name] = text
    return values


def _from_toml(path: Path) -> dict[str, Any]:
    return _settings_in(_document(path), path)


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError("config", f"{path}: {reason}") from None


def _settings_in(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, table in document.items():
        if section == "preset" and isinstance(table, str):
            values["preset"] = table
            continue
        if section not in sections() or not isinstance(table, dict):
            raise SettingsError(section, f"unknown section in {path}")
        for name, value in table.items():
            if section_of().get(name) != section:
                raise SettingsError(f"{section}.{name}", f"unknown setting in {path}")
            values[name] = value
    return values


def preset_names() -> list[str]:
    """Names of the presets that this package holds."""
    return sorted(file.stem for file in PRESETS.glob("*.toml"))


def read_preset(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(setting -> value, the table `about`) of a packaged preset or of a TOML file.

    A preset may build on another one: `preset = "NAME"` at its top. Raises SettingsError.
    """
    return _read_preset(name, ())


def _read_preset(name: str, above: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    if name in above:
        raise SettingsError("preset", f"{name} builds on itself")
    ours = name in preset_names()
    if not ours and not name.endswith(".toml"):
        known = ", ".join(preset_names())
        raise SettingsError("preset", f"unknown preset {name}; known: {known}")
    path = PRESETS / f"{name}.toml" if ours else Path(name)
    document = _document(path)
    about = document.pop("about", {})
    values = _settings_in(document, path)
    if ours:
        for key in ("model", "drafter"):  # they may name models that come with the code
            for root in (REPOSITORY, INSTALLED):
                if (folder := root / str(values.get(key))).is_dir():
                    values[key] = str(folder)
                    break
    if (base := values.pop("preset", None)) is None:
        return values, about
    base_values, base_about = _read_preset(base, (*above, name))
    return {**base_values, **values}, {**base_about, **about}


def _explain(error: ValidationError, origin: Mapping[str, str]) -> SettingsError:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][:2]]  # of a check of a section: the section alone
    source = origin.get(place[-1], "the defaults") if len(place) > 1 else "several settings"
    return SettingsError(".".join(place), f"{first['msg']} (from {source})")
