"""Create or update, test and delete an endpoint.

python -m deploy.sagemaker deploy NAME --image URI --role ARN --instance-type TYPE --preset P
python -m deploy.sagemaker test NAME
python -m deploy.sagemaker delete NAME
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from app.errors import AerieError
from deploy.sagemaker.endpoint import SAMPLE, DeployError, DesiredEndpoint, Endpoint, invoke, stream


def main(arguments: Sequence[str] | None = None, session: Any = None) -> int:
    """Run one command; returns the exit code. `session` is a boto3 session (default: a new one)."""
    options = _parser().parse_args(arguments)
    try:
        session = session or _session(options.region)
        run = {"deploy": _deploy, "test": _test, "delete": _delete}[options.command]
        run(session, options)
    except _errors() as error:
        print(f"sagemaker: {error}", file=sys.stderr)
        return 1
    return 0


def _errors() -> tuple[type[Exception], ...]:
    """What ends a command with a line instead of a traceback: AWS's refusals too."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return DeployError, AerieError
    return DeployError, AerieError, BotoCoreError, ClientError


def _deploy(session: Any, options: argparse.Namespace) -> None:
    environment = {}
    for pair in options.env:
        name, equals, value = pair.partition("=")
        if not equals:
            raise DeployError(f"--env {pair}: write NAME=VALUE")
        environment[name] = value
    desired = DesiredEndpoint(
        name=options.name,
        image=options.image,
        role=options.role,
        instance_type=options.instance_type,
        instances=options.instances,
        preset=options.preset,
        model_data=options.model_data,
        environment=environment,
        startup_s=options.startup_s,
        inference_ami_version=options.inference_ami_version,
    )
    Endpoint(session.client("sagemaker"), options.name).deploy(desired, wait_s=options.wait_s)


def _test(session: Any, options: argparse.Namespace) -> None:
    """One plain answer and one streamed, with their times; the two must be the same text."""
    runtime = session.client("sagemaker-runtime")
    body = json.loads(options.body) if options.body else SAMPLE
    started = time.perf_counter()
    answer = invoke(runtime, options.name, body)
    seconds = time.perf_counter() - started
    whole = text_of(answer["choices"][0])
    print(f"plain     {seconds:.2f} s  {answer['usage']['completion_tokens']} tokens")
    started, first, pieces = time.perf_counter(), 0.0, []
    for event in stream(runtime, options.name, body):
        first = first or time.perf_counter() - started
        pieces += [text_of(choice) for choice in event.get("choices", ())]
    print(f"streamed  {time.perf_counter() - started:.2f} s, first event after {first:.2f} s")
    if body.get("temperature") == 0 and "".join(pieces) != whole:
        raise DeployError(f"two texts for one request: {whole!r} and {''.join(pieces)!r}")
    print(whole)


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, of chat or text completions, whole or streamed."""
    message = choice.get("message") or choice.get("delta") or choice
    return message.get("content") or message.get("text") or ""


def _delete(session: Any, options: argparse.Namespace) -> None:
    Endpoint(session.client("sagemaker"), options.name).delete()


def _session(region: str | None) -> Any:
    try:
        import boto3
    except ImportError:
        raise DeployError("boto3 is not installed: pip install '.[sagemaker]'") from None
    return boto3.Session(region_name=region)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.sagemaker", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--region", help="AWS region; default: the session's")
    commands = parser.add_subparsers(dest="command", required=True)
    deploy = commands.add_parser("deploy", help="create the endpoint, or update it")
    deploy.add_argument("--image", required=True, help="this project's image in ECR")
    deploy.add_argument("--role", required=True, help="ARN of the execution role")
    deploy.add_argument("--instance-type", required=True, help="ml.p5.4xlarge, for example")
    deploy.add_argument("--instances", type=int, default=DesiredEndpoint.instances)
    deploy.add_argument("--preset", help="a preset's name (aerie models)")
    deploy.add_argument("--model-data", help="s3://bucket/prefix/ for /opt/ml/model")
    deploy.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    deploy.add_argument("--startup-s", type=int, default=DesiredEndpoint.startup_s)
    deploy.add_argument(
        "--inference-ami-version",
        metavar="NAME",
        help="SageMaker's host image; default: one with driver 580 for GPUs; '': SageMaker chooses",
    )
    deploy.add_argument("--wait-s", type=float, default=3600.0)
    test = commands.add_parser("test", help="send one request, plain and streamed")
    test.add_argument("--body", help="JSON of a request")
    delete = commands.add_parser("delete", help="delete endpoint, configuration and model")
    for command in (deploy, test, delete):
        command.add_argument("name", help="name of the endpoint")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
