"""The `aerie` command."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

from app.commands import command_line, doctor, sagemaker, vllm_options
from app.commands.vllm_options import AUTO_TOOLS, NEEDS_PARSER
from app.doctor.examination import check_start
from app.doctor.machine import GPU_MEMORY
from app.errors import AerieError, EngineLostError, SettingsError, StartupError
from app.settings import Settings, drop_service_links, load, section_of
from drafters.parent_death import is_spawned, request_death_signal
from drafters.streams import open_missing

# A child that multiprocessing spawns imports this module first, as the parent's main module, and
# then vllm for many seconds before it comes to the plugin (drafters/vllm/plugin.py).
if is_spawned():
    request_death_signal()

_OF_AERIE_ITSELF = ("-h", "--help", "--version")
VLLM_API_KEY = "VLLM_API_KEY"  # read by `vllm serve` where no --api-key is given
IGNORED = (
    "ignored what Kubernetes wrote for a Service: {}; `enableServiceLinks: false` keeps it out"
)
EXIT_FAILED, EXIT_USAGE, EXIT_ENGINE_LOST = 1, 2, 3


def run() -> NoReturn:
    """Run one command as the console script, then exit without Python's finalisation.

    Threads of vLLM still hold parts of Triton then, which finalisation would report as leaked, in
    thirty lines at every clean stop. Functions that were registered with atexit do run. Output that
    could not be written is a failure, except where nobody reads it any more.
    """
    open_missing()
    code = main()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # stderr has nobody to tell
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            pass
        except OSError as error:
            code = code or EXIT_FAILED
            print(f"aerie: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    ignored = drop_service_links(os.environ)
    if ignored and arguments[:1] != ["doctor"]:
        print(f"aerie: {IGNORED.format(', '.join(ignored))}", file=sys.stderr)
    if arguments[:1] == ["evaluate"]:  # these have their own options and need no gateway
        from drafters.train.evaluation.evaluate_head import main as evaluate

        return evaluate(arguments[1:])
    if arguments[:1] == ["bench"]:
        from bench.cli import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["train"]:
        from drafters.train.train_head import main as train

        return train(arguments[1:])
    if arguments[:1] == ["learn"]:
        from drafters.train.learner.parent import main as learn

        return learn(arguments[1:])
    if arguments[:1] == ["heads"]:
        return _heads(arguments[1:])
    if arguments[:1] == ["prompts"]:
        from drafters.train.prompts.generate_prompts import main as prompts

        return prompts(arguments[1:])
    if arguments[:1] == ["keys"]:
        return _keys(arguments[1:])
    if arguments[:1] == ["models"]:
        return _models(arguments[1:])
    if arguments[:1] == ["simulate"]:
        from bench.simulate.replay_tables import main as simulate

        return simulate(arguments[1:])
    parser, commands = _parser()
    if arguments and arguments[0].startswith("-") and arguments[0] not in _OF_AERIE_ITSELF:
        parser.error(f"{arguments[0]}: options come behind a command, as in `aerie serve --help`")
    theirs: list[str] = []
    if arguments and arguments[0] in commands:
        ours, theirs = command_line.split(arguments[1:], commands[arguments[0]])
        arguments = [arguments[0], *ours]
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    as_json = options.pop("json", False)
    model = options.pop("positional_model")
    try:
        _refuse_model_as_name(model or options["model"], options["served_model_name"] or ())
        given = _of_vllm(theirs)
        options = _joined({"model": model}, _joined(options, given))
        settings = load_settings(options)
        preset = options["preset"] or os.environ.get("AERIE_PRESET")
        if command == "doctor":
            return doctor.main(settings, as_json=as_json, preset=preset, ignored=ignored)
        _refuse_unfit_models(settings, preset)
        from app.server.run import serve

        serve(settings)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        if isinstance(error, EngineLostError):
            return EXIT_ENGINE_LOST
        return EXIT_USAGE if isinstance(error, SettingsError) else EXIT_FAILED
    return 0


def _refuse_model_as_name(model: str | None, names: Sequence[str]) -> None:
    """Refuse a MODEL that stands behind --served-model-name, which takes several names."""
    if model is None and len(names) > 1 and "/" in names[-1] and "AERIE_MODEL" not in os.environ:
        problem = f"takes {names[-1]} for a further name: write MODEL in front of the options"
        raise SettingsError("--served-model-name", problem)


def _of_vllm(options: Sequence[str]) -> dict[str, Any]:
    """Settings for options of `vllm serve`; under AUTO_TOOLS, whether they ask for tool calls.

    The parser that tool calls need may come from any source of settings.
    """
    if not options:
        return {}
    from app.engine.configuration import vllm_cli

    parsed = vllm_cli.parse(options)
    wants_tools = parsed.pop(AUTO_TOOLS, False)
    names = vllm_cli.engine_argument_names
    found = vllm_options.settings(parsed, names, lambda name: f"--{name.replace('_', '-')}")
    return {**found, AUTO_TOOLS: wants_tools}


def _of_yaml(file: str) -> dict[str, Any]:
    """Settings in a YAML file of `vllm serve --config`, as `_of_vllm` returns them."""
    try:
        return _of_vllm(["--config", file])
    except SettingsError as error:
        name = error.key.removeprefix("--").replace("-", "_")
        if name in section_of() and name not in vllm_options.SETTINGS.values():
            problem = "is no option of vLLM: give it on the command line or in a TOML file"
            raise SettingsError(f"{file}: {name}", problem) from None
        raise SettingsError(file, str(error)) from None


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge settings that were given in two ways. Raises SettingsError where they differ."""
    joined = dict(one)
    for name, value in other.items():
        if name == "engine_args" and joined.get(name) is not None:
            raise SettingsError(name, "give vLLM's options either here or one by one, not both")
        if value is not None and joined.get(name) not in (None, value):
            raise SettingsError(name, f"given twice: {joined[name]} and {value}")
        joined[name] = joined.get(name) if value is None else value
    return joined


def _keys(arguments: Sequence[str]) -> int:
    from app.commands.keys import main as keys

    try:
        return keys(arguments, os.environ)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return EXIT_USAGE


def _heads(arguments: Sequence[str]) -> int:
    from app.commands.heads import main as heads

    try:
        return heads(arguments)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return EXIT_USAGE


def _models(arguments: Sequence[str]) -> int:
    from app.commands.models import main as models

    try:
        return models(arguments)
    except AerieError as error:
        print(f"aerie: {error}", file=sys.stderr)
        return EXIT_USAGE


def _refuse_unfit_models(settings: Settings, preset: str | None) -> None:
    """Raise StartupError now for what the engine would report in half a minute by a stack trace.
    Print a warning of memory that may not suffice: vLLM says so when the weights are loaded."""
    for finding in check_start(settings, preset):
        text = f"{finding.check}: {finding.detail} ({finding.remedy})"
        if finding.status == "FAIL":
            raise StartupError(text)
        if finding.status == "warn" and finding.check == GPU_MEMORY:
            print(f"aerie: {text}", file=sys.stderr)


def load_settings(options: dict[str, Any]) -> Settings:
    """Load the settings from parsed command-line options, environment, file and preset."""
    given = {name: value for name, value in options.items() if value is not None}
    config, preset = given.pop("config", None), given.pop("preset", None)
    wants_tools = [given.pop(AUTO_TOOLS, False)]

    def read_yaml(file: str) -> dict[str, Any]:
        values = _of_yaml(file)
        wants_tools.append(values.pop(AUTO_TOOLS))
        return values

    container = None
    if sagemaker.hosted(os.environ):
        from app.engine.configuration import vllm_cli

        container = sagemaker.settings(os.environ, vllm_cli.parse, vllm_cli.engine_argument_names)
    load_with = partial(
        load,
        environ=os.environ,
        config_file=config,
        preset=preset,
        container=container,
        read_yaml=read_yaml,
    )
    settings = load_with(given)
    if (key := os.environ.get(VLLM_API_KEY)) and not settings.admission.guarded:
        settings = load_with({**given, "api_key": key})
    if any(wants_tools) and settings.model.tool_call_parser is None:
        raise SettingsError("--enable-auto-tool-choice", NEEDS_PARSER.format("--tool-call-parser"))
    return settings


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command's parser, and those of the commands that take settings."""
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
        "learn", help="train a head further on the traffic that a gateway captures", add_help=False
    )
    commands.add_parser(
        "heads", help="list, choose and export heads that were trained further", add_help=False
    )
    commands.add_parser(
        "prompts", help="let a target write prompts to train a head on", add_help=False
    )
    commands.add_parser(
        "evaluate", help="measure a head's acceptance length on held-out prompts", add_help=False
    )
    commands.add_parser(
        "bench", help="measure servers, compare methods of speculation", add_help=False
    )
    commands.add_parser("keys", help="create, list and revoke API keys", add_help=False)
    commands.add_parser("models", help="list presets and the memory they need", add_help=False)
    commands.add_parser(
        "simulate", help="simulate adaptive K on published speeds and loads", add_help=False
    )
    with_settings = {"serve": serve, "doctor": examine}
    for command in with_settings.values():
        command_line.add_settings(command)
    return parser, with_settings


if __name__ == "__main__":
    run()
