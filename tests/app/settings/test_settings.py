"""Settings: precedence, names, and refusals that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.cli import load_settings
from app.errors import SettingsError
from app.settings import REPOSITORY, Settings, load, section_of
from app.settings.engine import REFUSED
from docs.settings import PAGE, page


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "aerie.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", REFUSED)
def test_engine_arguments_that_cannot_work_are_refused_with_the_reason(name: str) -> None:
    """The fault: they were refused on vLLM's command line, and taken without a word here."""
    with pytest.raises(SettingsError, match=f"{name} cannot work here: {REFUSED[name]}") as caught:
        load({"engine_args": f'{{"{name}": true}}'}, {})
    assert caught.value.key == "engine.engine_args"
    load({"engine_args": f'{{"{name}": false}}'}, {})


def test_the_packaged_model_is_what_a_bare_start_uses() -> None:
    settings = load({}, {})
    assert settings.model.model == "packaged:smollm2-135m"
    assert settings.speculation.drafter == str(REPOSITORY / "models/smollm2-135m/p-eagle")
    assert settings.served_model_name == "smollm2-135m"
    assert settings.speculates


def test_a_preset_finds_the_models_of_this_repository() -> None:
    settings = load({}, {}, preset="embedded")
    assert settings.model.model == str(REPOSITORY / "models/embedded/target")
    assert settings.speculation.drafter == str(REPOSITORY / "models/embedded/p-eagle")
    assert settings.served_model_name == "aerie-embedded"


def test_a_given_model_keeps_the_default_preset_out() -> None:
    """The default head must never be paired with somebody else's target."""
    settings = load({"model": "org/some-model", "k": 0}, {})
    assert settings.speculation.drafter is None
    assert settings.served_model_name == "some-model"
    assert settings.model.tool_call_parser is None


def test_command_line_beats_environment_beats_file_beats_preset(tmp_path: Path) -> None:
    file = toml(tmp_path, '[server]\nport = 1111\nhost = "::1"\n[speculation]\nk = 3\n')
    environ = {"AERIE_PORT": "2222", "AERIE_K": "4", "AERIE_CONFIG": file, "HOME": "/"}
    assert load({}, {}, config_file=file).speculation.k == 3
    assert load({}, environ).server.port == 2222
    settings = load({"port": "3333"}, environ)
    assert (settings.server.port, settings.server.host, settings.speculation.k) == (3333, "::1", 4)


def test_one_key_is_kept_as_its_hash() -> None:
    from app.admission.key_store import KeyStore

    settings = load({"api_key": "sk-one"}, {})
    assert settings.admission.guarded
    assert "sk-one" not in repr(settings)
    ring = KeyStore(settings.admission).ring
    found = ring.find(b"sk-one")
    assert found is not None
    assert (found.tenant.name, found.admin) == ("default", False)
    assert ring.find(b"sk-two") is None


@pytest.mark.parametrize(
    "given", [{"api_key": "a", "keys": ""}, {"api_key": "a", "keys_file": "x"}, {"api_key": "ab\n"}]
)
def test_one_key_that_cannot_be(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="api_key") as caught:
        load(given, {})
    assert "ab" not in str(caught.value)


def test_a_setting_has_one_name_everywhere() -> None:
    """section_of asserts uniqueness; every section has settings."""
    assert set(section_of().values()) == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"redis_url": "foo"}, "admission.redis_url"),
        ({"redis_url": "localhost:6379"}, "admission.redis_url"),
        ({"redis_url": "redis://h:port/0"}, "admission.redis_url"),
        ({"max_model_len": "auto", "engine_args": "{bad"}, "engine.engine_args"),
        ({"max_model_len": "auto", "engine_args": "[1]"}, "engine.engine_args"),
        ({"allowed_origins": "[1]"}, "server.allowed_origins"),
        ({"served_model_name": 1}, "model.served_model_name"),
        ({"dtype": ["half"]}, "model.dtype"),
        ({"drain_timeout_s": "inf"}, "server.drain_timeout_s"),
        ({"idle_timeout_s": "inf"}, "server.idle_timeout_s"),
    ],
)
def test_what_cannot_be_read_is_named(given: dict[str, Any], key: str) -> None:
    """Catches: a stack trace of Python's, of a check or later in the start."""
    with pytest.raises(SettingsError) as caught:
        load(given, {}, preset="embedded")
    assert caught.value.key == key


def test_a_broken_url_of_redis_does_not_show_its_password() -> None:
    with pytest.raises(SettingsError) as caught:
        load({"redis_url": "redis://:secret/word@host:1/0"}, {}, preset="embedded")
    assert "secret" not in str(caught.value)


def test_an_empty_url_of_redis_is_none() -> None:
    assert load({}, {"AERIE_REDIS_URL": ""}, preset="embedded").admission.redis_url is None


@pytest.mark.parametrize(
    ("cli", "environ", "key"),
    [
        ({"port": "99999"}, {}, "server.port"),
        ({"port": "http"}, {}, "server.port"),
        ({"k": "-1"}, {}, "speculation.k"),
        ({"dtype": "float8"}, {}, "model.dtype"),
        ({}, {"AERIE_NO_SUCH_KEY": "1"}, "AERIE_NO_SUCH_KEY"),
        ({}, {"AERIE_PRESET": "nope"}, "preset"),
        ({}, {"AERIE_CONFIG": "/no/such.toml"}, "config"),
        ({"engine_args": "{"}, {}, "engine.engine_args"),
        ({"engine_args": "[1]"}, {}, "engine.engine_args"),
        ({"model": "org/some-model", "lookup_k": "0"}, {}, "lookup_k"),
        ({"model": "org/some-model", "objective": "fixed"}, {}, "objective"),
        ({"objective": "latency"}, {}, "tpot_s"),
        ({"tpot_s": "0.02"}, {}, "tpot_s"),
        ({"objective": "fast"}, {}, "speculation.objective"),
        ({"learn": "d", "k": "0"}, {}, "learn"),
        ({"learn": "d", "model": "org/some-model"}, {}, "learn"),
        ({"learn": "d", "quantization": "fp8"}, {}, "learn"),
        ({"learn": ""}, {}, "learning.learn"),
        ({}, {"AERIE_HOST": ""}, "server.host"),
        ({}, {"AERIE_MODEL": ""}, "model.model"),
        ({}, {"AERIE_DRAFTER": ""}, "speculation.drafter"),
        ({}, {"AERIE_KEYS_FILE": ""}, "admission.keys_file"),
        ({"learn_mib": "0"}, {}, "learning.learn_mib"),
        ({"learn_device": "gpu"}, {}, "learning.learn_device"),
        ({"learn_exclude": "a, b c"}, {}, "learning.learn_exclude"),
    ],
)
def test_unknown_and_invalid_keys_are_named(
    cli: dict[str, str], environ: dict[str, str], key: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(cli, environ)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[server]\nprot = 1\n", "server.prot"),
        ("[sever]\nport = 1\n", "sever"),
        ("[model]\nport = 1\n", "model.port"),
        ("port = 1\n", "port"),
        ("[server\n", "config"),
    ],
)
def test_unknown_keys_in_a_file_are_named(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({}, {}, config_file=toml(tmp_path, text))
    assert caught.value.key == key


def test_where_an_invalid_value_came_from_is_told() -> None:
    with pytest.raises(SettingsError, match="from environment"):
        load({"host": "::1"}, {"AERIE_PORT": "x"})


def test_a_preset_can_be_a_file(tmp_path: Path) -> None:
    preset = toml(tmp_path, '[model]\nmodel = "a/b"\n[speculation]\ndrafter = "c/d"\nk = 7\n')
    settings = load({}, {}, preset=preset)
    assert (settings.model.model, settings.speculation.drafter) == ("a/b", "c/d")


def test_nothing_is_learned_unless_a_folder_is_given() -> None:
    learning = load({}, {}).learning
    assert learning.learn is None
    assert learning.excluded == frozenset()
    learning = load({"learn": "d", "learn_exclude": "Search, mail,(anonymous),"}, {}).learning
    assert learning.excluded == {"Search", "mail", "(anonymous)"}  # tenants' names have a case


def test_options_that_were_not_given_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_PORT", "2222")
    assert load_settings({"port": None, "config": None, "preset": None}).server.port == 2222


def test_the_page_has_every_setting_as_declared() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m docs.settings"
    assert all(f"| `{name}` |" in page() for name in section_of())


def test_a_preset_and_a_file_of_higher_precedence_hide_the_others(tmp_path: Path) -> None:
    file = toml(tmp_path, 'preset = "embedded"')
    other = toml(tmp_path, 'preset = "gpt-oss-20b"')
    environ = {"AERIE_PRESET": "qwen3-8b", "AERIE_CONFIG": str(tmp_path / "none.toml")}
    packaged = load({}, environ, preset="smollm2-135m", config_file=other)
    assert packaged.served_model_name == "smollm2-135m"
    assert load({}, environ, config_file=file).model.model == "Qwen/Qwen3-8B"
