"""The endpoint's life against a simulated SageMaker, and the stream's parts put together."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
moto = pytest.importorskip("moto", reason="moto is not installed")

from botocore.exceptions import ClientError  # noqa: E402 - after the skips

from app.settings import load  # noqa: E402 - after the skips
from deploy.sagemaker.__main__ import main  # noqa: E402 - after the skips
from deploy.sagemaker.endpoint import (  # noqa: E402
    CUDA_13_AMI,
    DeployError,
    DesiredEndpoint,
    Endpoint,
    stream,
)

NAME = "aerie"
KNOWN_TO_MOTO = "ml.g4dn.12xlarge"  # its list of instance types ends before those of ours
DESIRED = DesiredEndpoint(
    name=NAME,
    image="111111111111.dkr.ecr.us-east-1.amazonaws.com/aerie:1",
    role="arn:aws:iam::111111111111:role/sagemaker",
    instance_type=KNOWN_TO_MOTO,
    preset="gpt-oss-20b",
)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with moto.mock_aws():
        yield boto3.Session(region_name="us-east-1")


class Updating:
    """moto has no update_endpoint: this one points the endpoint to the other configuration, and
    keeps what it was told of variants. It refuses a second model or configuration of a name, which
    moto takes."""

    rolls_back = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self.variants: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def create_model(self, **given: Any) -> None:
        taken, _, _ = names(self._client)
        if given["ModelName"] in taken:
            raise _refused("CreateModel", "Cannot create already existing model")
        self._client.create_model(**given)

    def create_endpoint_config(self, **given: Any) -> None:
        _, taken, _ = names(self._client)
        if given["EndpointConfigName"] in taken:
            message = "Cannot create already existing endpoint configuration"
            raise _refused("CreateEndpointConfig", message)
        self._client.create_endpoint_config(**given)

    def update_endpoint(self, EndpointName: str, EndpointConfigName: str, **variants: Any) -> None:
        self.variants.append(variants)
        if self.rolls_back:
            return
        self._client.delete_endpoint(EndpointName=EndpointName)
        self._client.create_endpoint(
            EndpointName=EndpointName, EndpointConfigName=EndpointConfigName
        )


def _refused(operation: str, message: str) -> ClientError:
    error = {"Code": "ValidationException", "Message": message}
    return ClientError({"Error": error}, operation)


@pytest.fixture
def endpoint(session: Any) -> Endpoint:
    lines: list[str] = []
    made = Endpoint(Updating(session.client("sagemaker")), NAME, say=lines.append, sleep=_never)
    made.lines = lines  # type: ignore[attr-defined]
    return made


def _never(_: float) -> None:
    raise AssertionError("nothing to wait for")


def names(client: Any) -> tuple[list[str], list[str], list[str]]:
    return (
        [found["ModelName"] for found in client.list_models()["Models"]],
        [
            found["EndpointConfigName"]
            for found in client.list_endpoint_configs()["EndpointConfigs"]
        ],
        [found["EndpointName"] for found in client.list_endpoints()["Endpoints"]],
    )


def test_an_endpoint_s_life(endpoint: Endpoint, session: Any) -> None:
    client = session.client("sagemaker")
    endpoint.deploy(DESIRED)
    first = f"{NAME}-{DESIRED.mark()}"
    assert names(client) == ([first], [first], [NAME])
    container = client.describe_model(ModelName=first)["PrimaryContainer"]
    assert container["Image"] == DESIRED.image
    assert container["Environment"] == {"AERIE_PRESET": "gpt-oss-20b", "SM_VLLM_PORT": "8080"}
    variant = client.describe_endpoint_config(EndpointConfigName=first)["ProductionVariants"][0]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == (KNOWN_TO_MOTO, 1)

    endpoint.deploy(DESIRED)  # the same one again changes nothing
    assert names(client) == ([first], [first], [NAME])

    other = DesiredEndpoint(**{**vars(DESIRED), "environment": {"SM_VLLM_MAX_MODEL_LEN": "8192"}})
    endpoint.deploy(other)
    second = f"{NAME}-{other.mark()}"
    assert second != first
    assert names(client) == ([second], [second], [NAME])
    container = client.describe_model(ModelName=second)["PrimaryContainer"]
    assert container["Environment"]["SM_VLLM_MAX_MODEL_LEN"] == "8192"

    endpoint.delete()
    assert names(client) == ([], [], [])
    endpoint.delete()  # nothing left is no error
    assert endpoint.lines[-1] == f"there is no endpoint {NAME}"  # type: ignore[attr-defined]


def test_what_serves_after_a_rollback_is_kept(endpoint: Endpoint, session: Any) -> None:
    client = session.client("sagemaker")
    endpoint.deploy(DESIRED)
    first = f"{NAME}-{DESIRED.mark()}"
    other = DesiredEndpoint(**{**vars(DESIRED), "instances": 2})
    endpoint.client.rolls_back = True
    for _ in range(2):  # the second time there are a model and a configuration of its name
        with pytest.raises(DeployError, match=f"went back to {first}"):
            endpoint.deploy(other)
    models, configurations, _ = names(client)
    assert first in models
    assert first in configurations
    endpoint.client.rolls_back = False
    endpoint.deploy(other)
    second = f"{NAME}-{other.mark()}"
    assert names(client) == ([second], [second], [NAME])


def test_an_update_keeps_the_instances_that_scaling_added(endpoint: Endpoint) -> None:
    """It went back to `instances`, in the middle of a load that needs more, unless told to keep
    what is there. Another `instances` is meant."""
    endpoint.deploy(DESIRED)
    other = DesiredEndpoint(**{**vars(DESIRED), "environment": {"SM_VLLM_MAX_MODEL_LEN": "8192"}})
    endpoint.deploy(other)
    endpoint.deploy(DesiredEndpoint(**{**vars(other), "instances": 3}))
    count = {"VariantPropertyType": "DesiredInstanceCount"}
    assert endpoint.client.variants == [
        {"RetainAllVariantProperties": True, "ExcludeRetainedVariantProperties": []},
        {"RetainAllVariantProperties": True, "ExcludeRetainedVariantProperties": [count]},
    ]


class Described:
    """An endpoint on the configuration of DESIRED, in one status after the other."""

    def __init__(self, *statuses: str) -> None:
        self._statuses = Statuses(*statuses)

    def describe_endpoint(self, **_: str) -> dict[str, str]:
        configuration = {"EndpointConfigName": f"{NAME}-{DESIRED.mark()}"}
        return {**self._statuses.describe_endpoint(), **configuration}


def test_the_same_command_again_waits_or_says_what_to_do() -> None:
    said: list[str] = []
    starting = Described("Creating", "Creating", "InService")
    Endpoint(starting, NAME, say=said.append, sleep=lambda _: None).deploy(DESIRED)
    assert said[-1].startswith("aerie is in service")
    failed = Endpoint(Described("Failed"), NAME, say=said.append, sleep=_never)
    with pytest.raises(DeployError, match="did not pass /ping: delete it first"):
        failed.deploy(DESIRED)


def test_a_refusal_of_aws_is_one_line(session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", NAME, "--image", DESIRED.image, "--role", DESIRED.role]
    assert main([*words, "--instance-type", "ml.nonsense"], session=session) == 1
    assert capsys.readouterr().err.startswith("sagemaker: An error occurred (ValidationException)")


def test_artefacts_in_s3_become_the_model_folder(endpoint: Endpoint, session: Any) -> None:
    desired = DesiredEndpoint(
        **{**vars(DESIRED), "preset": None, "model_data": "s3://bucket/pair/"}
    )
    endpoint.deploy(desired)
    client = session.client("sagemaker")
    model = client.describe_model(ModelName=f"{NAME}-{desired.mark()}")["PrimaryContainer"]
    assert model["ModelDataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/pair/"


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, CUDA_13_AMI),
        ({"inference_ami_version": "al2-ami-sagemaker-inference-gpu-3-1"}, None),
        ({"inference_ami_version": ""}, ""),
        ({"instance_type": "ml.c5.4xlarge"}, ""),
    ],
)
def test_gpus_get_a_host_image_whose_driver_runs_cuda_13(
    endpoint: Endpoint, session: Any, changes: dict[str, Any], version: str | None
) -> None:
    """With the driver that SageMaker has by default no engine started on several types."""
    desired = DesiredEndpoint(**{**vars(DESIRED), **changes})
    endpoint.deploy(desired)
    found = session.client("sagemaker").describe_endpoint_config(
        EndpointConfigName=f"{NAME}-{desired.mark()}"
    )
    expected = changes["inference_ami_version"] if version is None else version
    assert found["ProductionVariants"][0].get("InferenceAmiVersion", "") == expected


def test_another_host_image_makes_another_configuration(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the default changes, in a later version of this project."""
    assert (
        DESIRED.mark() != DesiredEndpoint(**{**vars(DESIRED), "inference_ami_version": ""}).mark()
    )
    before = DESIRED.mark()
    monkeypatch.setattr("deploy.sagemaker.endpoint.CUDA_13_AMI", "another")
    assert DESIRED.mark() != before


def test_sagemaker_knows_the_host_image(session: Any) -> None:
    model = session.client("sagemaker").meta.service_model
    assert CUDA_13_AMI in model.shape_for("ProductionVariantInferenceAmiVersion").enum


FOUR_GPUS = {"instance_type": "ml.g6e.12xlarge"}
TENSOR = "AERIE_TENSOR_PARALLEL_SIZE"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instance_type": "ml.g6.2xlarge", "preset": "gpt-oss-120b"}, "take larger GPUs"),
        (
            {"instance_type": "ml.g6e.12xlarge", "preset": "gpt-oss-120b"},
            "--env AERIE_TENSOR_PARALLEL_SIZE=2",
        ),
        ({**FOUR_GPUS, "environment": {TENSOR: "8"}}, "has 4 GPUs, and not 8"),
        ({**FOUR_GPUS, "environment": {TENSOR: "all"}}, "'all', no number"),
        ({"startup_s": 7200}, "60 to 3600"),
        ({"model_data": "s3://bucket/pair"}, "with a slash"),
    ],
)
def test_what_could_never_serve_is_refused_before_it_is_paid_for(
    endpoint: Endpoint, session: Any, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DeployError, match=words):
        endpoint.deploy(DesiredEndpoint(**{**vars(DESIRED), **changes}))
    assert names(session.client("sagemaker")) == ([], [], [])


def test_the_container_serves_what_was_wished_for_where_sagemaker_looks() -> None:
    """The environment goes through the gateway's own settings, with vLLM's own parser."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from app.commands import sagemaker
    from app.engine.configuration.vllm_cli import engine_argument_names, parse

    environ = DESIRED.variables()
    assert sagemaker.hosted(environ, Path("/no/such/folder"))
    found = sagemaker.settings(environ, parse, engine_argument_names, Path("/no/such/folder"))
    ours = {key: value for key, value in environ.items() if key.startswith("AERIE_")}
    settings = load({}, ours, container=found)
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8080)
    assert settings.model.model == "openai/gpt-oss-20b"
    assert (settings.speculation.k, settings.model.tool_call_parser) == (7, "openai")


def test_a_pair_over_several_gpus_is_taken(endpoint: Endpoint) -> None:
    changes = {
        "instance_type": "ml.g6e.12xlarge",
        "preset": "gpt-oss-120b",
        "environment": {"AERIE_TENSOR_PARALLEL_SIZE": "4"},
    }
    DesiredEndpoint(**{**vars(DESIRED), **changes}).check()


class Statuses:
    """An endpoint that goes through these."""

    def __init__(self, *statuses: str) -> None:
        self.left = list(statuses)

    def describe_endpoint(self, **_: str) -> dict[str, str]:
        status = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {"EndpointStatus": status, "FailureReason": "the container did not pass /ping"}


def test_waiting_ends_with_service_or_a_reason() -> None:
    said: list[str] = []
    slept: list[float] = []
    going = Statuses("Creating", "Creating", "InService")
    Endpoint(going, NAME, say=said.append, sleep=slept.append).wait(3600)
    assert said == ["aerie: Creating", "aerie: InService"]
    assert len(slept) == 2
    failing = Endpoint(Statuses("Failed"), NAME, say=said.append, sleep=slept.append)
    with pytest.raises(DeployError, match="did not pass /ping"):
        failing.wait(3600)
    slow = Endpoint(Statuses("Creating"), NAME, say=said.append, sleep=slept.append)
    with pytest.raises(DeployError, match="is Creating after 60 s"):
        slow.wait(60)


class Runtime:
    """boto3's `sagemaker-runtime`, with an answer cut into parts of `size` bytes."""

    def __init__(self, answer: bytes, size: int = 7) -> None:
        self.answer, self.size = answer, size

    def client(self, _: str) -> Runtime:
        return self

    def invoke_endpoint(self, **_: str) -> dict[str, Any]:
        choice = {"text": "wörd"}
        body = {"choices": [choice], "usage": {"completion_tokens": 2}}
        return {"Body": io.BytesIO(json.dumps(body).encode())}

    def invoke_endpoint_with_response_stream(self, **arguments: str) -> dict[str, Any]:
        assert json.loads(arguments["Body"])["stream"] is True
        parts = (self.answer[at : at + self.size] for at in range(0, len(self.answer), self.size))
        return {"Body": ({"PayloadPart": {"Bytes": part}} for part in parts)}


def events(*pieces: str) -> bytes:
    lines = [
        f"data: {json.dumps({'choices': [{'text': piece}]}, ensure_ascii=False)}\n\n"
        for piece in pieces
    ]
    return (": keep-alive\n\n" + "".join(lines) + "data: [DONE]\n\n").encode()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_may_be_cut_anywhere(size: int) -> None:
    found = stream(Runtime(events("wö", "rd"), size), NAME, {"prompt": "x"})
    assert [event["choices"][0]["text"] for event in found] == ["wö", "rd"]


def test_an_error_within_a_stream_is_an_error() -> None:
    answer = b'data: {"error": {"message": "the engine died"}}\n\n'
    with pytest.raises(DeployError, match="the engine died"):
        list(stream(Runtime(answer), NAME, {"prompt": "x"}))


def test_the_command_tests_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    good: Any = Runtime(events("wö", "rd"))
    assert main(["test", NAME], session=good) == 0
    assert capsys.readouterr().out.endswith("wörd\n")
    other: Any = Runtime(events("other"))
    assert main(["test", NAME], session=other) == 1
    assert "two texts for one request" in capsys.readouterr().err


def test_the_command_deploys_and_deletes(session: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["deploy", NAME, "--image", DESIRED.image, "--role", DESIRED.role]
    words += ["--instance-type", KNOWN_TO_MOTO, "--preset", "gpt-oss-20b", "--env", "A=b=c"]
    words += ["--inference-ami-version", "al2-ami-sagemaker-inference-gpu-2"]
    assert main(words, session=session) == 0
    client = session.client("sagemaker")
    (model,), (configuration,), _ = names(client)
    (variant,) = client.describe_endpoint_config(EndpointConfigName=configuration)[
        "ProductionVariants"
    ]
    assert variant["InferenceAmiVersion"] == "al2-ami-sagemaker-inference-gpu-2"
    environment = client.describe_model(ModelName=model)["PrimaryContainer"]["Environment"]
    assert environment["A"] == "b=c"
    assert main(["delete", NAME], session=session) == 0
    assert names(client) == ([], [], [])
    assert main([*words, "--env", "nonsense"], session=session) == 1
    assert "NAME=VALUE" in capsys.readouterr().err
