"""Checks of what the gateway itself needs at its start, as the start reads it."""

from __future__ import annotations

from app.admission.key_store import KeyStore
from app.doctor.report import Finding, fail, ok, warn
from app.engine.configuration import parsers
from app.errors import SettingsError
from app.learning.folder import check_folder
from app.settings import Settings


def check_keys(settings: Settings) -> list[Finding]:
    """The finding about API keys; none where requests need no key."""
    if not settings.admission.guarded:
        return []
    try:
        store = KeyStore(settings.admission)
    except SettingsError as error:
        return [fail("keys", str(error), "`aerie keys create NAME` makes a file of keys")]
    return [ok("keys", f"{len(store.ring.keys)} keys")]


def check_parsers(settings: Settings) -> list[Finding]:
    """The finding about a parser that vLLM itself does not have; none where it has them, or where
    none is named. Imports vllm, but not its plugins, which would change this process."""
    if not settings.model.tool_call_parser and not settings.model.reasoning_parser:
        return []
    try:
        parsers.check_parsers(settings)
    except SettingsError as error:
        remedy = "choose one of these, unless an installed plugin of vLLM has it"
        return [warn("parser", str(error), remedy)]
    except Exception as error:  # of a broken installation, on which there are other findings
        problem = f"not checked, vllm cannot be imported: {type(error).__name__}: {error}"
        return [warn("parser", problem, "make clean install")]
    return []


def check_learning(settings: Settings) -> list[Finding]:
    """The finding about the folder of learning; none where nothing is learned."""
    folder = settings.learning.learn
    if folder is None:
        return []
    try:
        check_folder(folder)
    except SettingsError as error:
        return [fail("learn", str(error), "--learn with a folder of its own that can be written")]
    return [ok("learn", folder)]
