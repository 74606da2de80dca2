"""The `aerie` command."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NoReturn

from app import doctor, sagemaker
from app.errors import AerieError, EngineLostError, SettingsError, StartupError
from app.settings import Settings, load, sections
from drafters.parent_death import request_death_signal

# A child that multiprocessing's `spawn` makes imports this first, as the parent's main module, and
# vllm for many seconds before it comes to the plugin (drafters/vllm/plugin.py).
if "__mp_main__" in sys.modules:
    request_death_signal()

EXIT_FAILED, EXIT_USAGE, EXIT_ENGINE_LOST = 1, 2, 3


def run() -> NoReturn:
    """The console script: one command, then the end of the process without Python's finalisation.
    Threads of vLLM still hold parts of Triton then, which that reports as leaked in thirty lines,
    at every clean stop. What was left for the exit (atexit) is done."""
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["evaluate"]:  # these have their own options and need no gateway
        from drafters.train.evaluate import main as evaluate

        return evaluate(arguments[1:])
    if arguments[:1] == ["bench"]:
        from bench.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["train"]:
        from drafters.train.command import main as train

        return train(arguments[1:])
    if arguments[:1] == ["prompts"]:
        from drafters.train.prompts.command import main as prompts

        return prompts(arguments[1:])
    if arguments[:1] == ["keys"]:
        return _keys(arguments[1:])
    if arguments[:1] == ["models"]:
        return _models(arguments[1:])
    if arguments[:1] == ["simulate"]:
        from drafters.control.simulate.command import main as simulate

        return simulate(arguments[1:])
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    as_json = options.pop("json", False)
    model = options.pop("positional_model")
    try:
        if model is not None:
            if options["model"] not in (None, model):
                raise SettingsError("model", f"given twice: {model} and {options['model']}")
            options["model"] = model
        settings = load_settings(options)
        preset = options["preset"] or os.environ.get("AERIE_PRESET")
        if command == "doctor":
            return doctor.main(settings, as_json=as_json, preset=preset)
        _refuse_unfit_models(settings, preset)
        from app.server import serve

        serve(settings)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        if isinstance(error, EngineLostError):
            return EXIT_ENGINE_LOST
        return EXIT_USAGE if isinstance(error, SettingsError) else EXIT_FAILED
    return 0


def _keys(arguments: Sequence[str]) -> int:
    from app.admission.command import main as keys

    try:
        return keys(arguments, os.environ)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return EXIT_USAGE


def _models(arguments: Sequence[str]) -> int:
    from app.presets.command import main as models

    try:
        return models(arguments)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return EXIT_USAGE


def _refuse_unfit_models(settings: Settings, preset: str | None) -> None:
    """Say in one line now what the engine would say in a stack trace after half a minute."""
    for finding in doctor.check_start(settings, preset):
        if finding.status == "FAIL":
            raise StartupError(f"{finding.check}: {finding.detail} ({finding.remedy})")


def load_settings(options: dict[str, Any]) -> Settings:
    """Parsed command-line options plus environment, file and preset."""
    given = {name: value for name, value in options.items() if value is not None}
    config, preset = given.pop("config", None), given.pop("preset", None)
    container = None
    if sagemaker.hosted(os.environ):
        from app.engine import arguments

        container = sagemaker.settings(os.environ, arguments.parse, arguments.engine_argument_names)
    return load(given, os.environ, config_file=config, preset=preset, container=container)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aerie", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"aerie {version('aerie')}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start the gateway", allow_abbrev=False)
    examine = commands.add_parser(
        "doctor", help="check this machine, the models and the port", allow_abbrev=False
    )
    examine.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser(
        "train", help="train a draft head for a target on your prompts", add_help=False
    )
    commands.add_parser(
        "prompts", help="let a target write prompts to train a head on", add_help=False
    )
    commands.add_parser(
        "evaluate", help="acceptance length of a head on held-out prompts", add_help=False
    )
    commands.add_parser(
        "bench", help="measure servers, compare methods of speculation", add_help=False
    )
    commands.add_parser("keys", help="create, list and revoke API keys", add_help=False)
    commands.add_parser("models", help="what can be served by name, and its needs", add_help=False)
    commands.add_parser(
        "simulate", help="adaptive K on published speeds and moving loads", add_help=False
    )
    for command in (serve, examine):
        _add_settings(command)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option per setting, generated from the settings tree; the model needs none."""
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="the same as --model MODEL"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--preset", metavar="NAME", help="preset name or TOML file")
    for section, cls in sections().items():
        group = parser.add_argument_group(section, (cls.__doc__ or "").splitlines()[0])
        for name, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            hint = "" if default in (None, "", {}) else f" [{default}]"
            options: dict[str, Any] = {"help": f"{field.description}{hint}", "default": None}
            if field.annotation is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["metavar"] = name.rsplit("_", 1)[-1].upper()
            group.add_argument(f"--{name.replace('_', '-')}", **options)


if __name__ == "__main__":
    run()
