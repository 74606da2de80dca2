"""One SageMaker endpoint, with its model and its endpoint configuration.

Model and configuration are named after the endpoint and a hash of what they hold. So the same
`DesiredEndpoint` twice changes nothing; another one makes new ones, to which the endpoint is moved.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from app.commands.sagemaker import PORT
from app.presets.about import about_preset
from app.presets.memory import fewest_gpus, need
from app.settings import of_preset

VARIANT = "all"
POLL_S = 15.0
SAMPLE = {"prompt": "def read_config(path):\n", "max_tokens": 32, "temperature": 0}

# SageMaker's host image with driver 580, which CUDA 13 of the image needs. Several GPU types have a
# driver as old as 470 otherwise, with which no engine starts.
CUDA_13_AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
_GPU_TYPE = re.compile(r"ml\.[gp][0-9]")

# Instance type -> (GPUs, GiB of memory of each), for the check that a preset fits.
INSTANCES: dict[str, tuple[int, float]] = {
    "ml.g5.2xlarge": (1, 22.5), "ml.g5.12xlarge": (4, 22.5), "ml.g5.48xlarge": (8, 22.5),
    "ml.g6.2xlarge": (1, 22.5), "ml.g6.12xlarge": (4, 22.5), "ml.g6.48xlarge": (8, 22.5),
    "ml.g6e.2xlarge": (1, 45.0), "ml.g6e.12xlarge": (4, 45.0), "ml.g6e.48xlarge": (8, 45.0),
    "ml.p4d.24xlarge": (8, 40.0), "ml.p4de.24xlarge": (8, 80.0),
    "ml.p5.4xlarge": (1, 79.6), "ml.p5.48xlarge": (8, 79.6),
    "ml.p5e.48xlarge": (8, 140.4), "ml.p5en.48xlarge": (8, 140.4),
}  # fmt: skip


class DeployError(Exception):
    """What was asked for cannot be had; the message is for the operator."""


@dataclass(frozen=True)
class DesiredEndpoint:
    """The desired state of an endpoint."""

    name: str
    image: str
    role: str
    instance_type: str
    instances: int = 1
    preset: str | None = None
    model_data: str | None = None  # s3://bucket/prefix/ with the files of /opt/ml/model
    environment: Mapping[str, str] = field(default_factory=dict)
    startup_s: int = 1800  # within which /ping must say 200, downloading included
    # SageMaker's host image. None: one for CUDA 13 where there are GPUs; "": SageMaker's default.
    inference_ami_version: str | None = None

    def ami_version(self) -> str:
        """The host image that the configuration names; empty if SageMaker is to choose."""
        if self.inference_ami_version is not None:
            return self.inference_ami_version
        return CUDA_13_AMI if _GPU_TYPE.match(self.instance_type) else ""

    def variables(self) -> dict[str, str]:
        """The container's environment. SM_VLLM_PORT tells the gateway that it runs on SageMaker."""
        chosen = {"SM_VLLM_PORT": str(PORT)}
        if self.preset is not None:
            chosen["AERIE_PRESET"] = self.preset
        return {**chosen, **self.environment}

    def check(self) -> None:
        """Raises DeployError for what SageMaker or the gateway would refuse half an hour later."""
        if not 60 <= self.startup_s <= 3600:
            raise DeployError(f"startup_s is {self.startup_s}, SageMaker takes 60 to 3600")
        if self.model_data is not None and not self.model_data.endswith("/"):
            raise DeployError(f"{self.model_data}: name the folder, with a slash at its end")
        if self.preset is None or self.instance_type not in INSTANCES:
            return
        gpus, gib = INSTANCES[self.instance_type]
        settings, about = of_preset(self.preset), about_preset(self.preset)
        asked = self.environment.get("AERIE_TENSOR_PARALLEL_SIZE")
        asked = asked or self.environment.get("SM_VLLM_TENSOR_PARALLEL_SIZE")
        try:
            wanted = int(asked or settings.engine.tensor_parallel_size)
        except ValueError:
            raise DeployError(f"the tensor parallel size is {asked!r}, no number") from None
        if wanted > gpus:
            raise DeployError(f"{self.instance_type} has {gpus} GPUs, and not {wanted}")
        fewest = fewest_gpus(settings, about, gib, most=gpus)
        if fewest is None or fewest > wanted:
            needed = need(settings, about, wanted, gib)
            remedy = f"--env AERIE_TENSOR_PARALLEL_SIZE={fewest}" if fewest else "take larger GPUs"
            raise DeployError(
                f"{self.preset} does not fit {wanted} of {self.instance_type}'s {gpus} GPUs of "
                f"{gib} GiB: {needed.sum() if needed else ''} ({remedy})"
            )

    def mark(self) -> str:
        """Eight hexadecimal digits of a hash of the desired state, for names."""
        held = {**asdict(self), "inference_ami_version": self.ami_version()}
        text = json.dumps(held, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


class Endpoint:
    """Creates, updates and deletes one endpoint.

    `sagemaker` is boto3's client of that name; `say` gets a line of progress at a time.
    """

    def __init__(
        self,
        sagemaker: Any,
        name: str,
        *,
        say: Callable[[str], None] = print,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.client, self.name = sagemaker, name
        self.say, self.sleep = say, sleep

    def deploy(self, desired: DesiredEndpoint, *, wait_s: float = 3600.0) -> None:
        """Create the endpoint or update it to its desired state; returns when it serves.

        The earlier model and configuration are deleted then. New ones that did not come up are left
        for inspection, and taken by the same command again. Raises DeployError if it fails, or if
        SageMaker went back to the earlier configuration.
        """
        desired.check()
        resource = f"{self.name}-{desired.mark()}"
        found = self.description()
        before = None if found is None else found["EndpointConfigName"]
        if found is not None and found["EndpointStatus"] == "Failed":
            raise DeployError(f"{self.name}: Failed: {_reason(found)}: delete it first")
        if found is not None and before == resource and found["EndpointStatus"] == "InService":
            self.say(f"{self.name} is up to date ({resource})")
            return
        if before != resource:
            self._create_model(resource, desired)
            self._create_configuration(resource, desired)
            if before is None:
                self.client.create_endpoint(EndpointName=self.name, EndpointConfigName=resource)
            else:
                self._update(before, resource, desired.instances)
        found = self.wait(wait_s)
        if found["EndpointConfigName"] != resource:
            kept = found["EndpointConfigName"]
            raise DeployError(
                f"{self.name} went back to {kept}, which serves: {_reason(found)} ({resource} is "
                "left for inspection)"
            )
        if before not in (None, resource):
            self._delete_parts(before)
        self.say(f"{self.name} is in service ({resource})")

    def wait(self, wait_s: float) -> dict[str, Any]:
        """Wait until the endpoint is in service; returns SageMaker's description of it.

        Raises DeployError if it fails or takes longer.
        """
        left, last = wait_s, ""
        while True:
            found: dict[str, Any] = self.client.describe_endpoint(EndpointName=self.name)
            status = found["EndpointStatus"]
            if status != last:
                self.say(f"{self.name}: {status}")
                last = status
            if status == "InService":
                return found
            if status in ("Failed", "UpdateRollbackFailed", "OutOfService"):
                raise DeployError(f"{self.name}: {status}: {_reason(found)}")
            if left <= 0:
                raise DeployError(f"{self.name} is {status} after {wait_s:.0f} s")
            self.sleep(POLL_S)
            left -= POLL_S

    def delete(self) -> None:
        """Delete the endpoint, its configuration and its model."""
        found = self.description()
        if found is None:
            self.say(f"there is no endpoint {self.name}")
            return
        self.client.delete_endpoint(EndpointName=self.name)
        self._delete_parts(found["EndpointConfigName"])
        self.say(f"{self.name} is deleted")

    def description(self) -> dict[str, Any] | None:
        """SageMaker's description of the endpoint; None if there is none."""
        from botocore.exceptions import ClientError

        try:
            found: dict[str, Any] = self.client.describe_endpoint(EndpointName=self.name)
        except ClientError as error:
            if error.response["Error"]["Code"] != "ValidationException":
                raise  # a ValidationException is how SageMaker says: not found
            return None
        return found

    def _create_model(self, resource: str, desired: DesiredEndpoint) -> None:
        container: dict[str, Any] = {"Image": desired.image, "Environment": desired.variables()}
        if desired.model_data is not None:
            container["ModelDataSource"] = {
                "S3DataSource": {
                    "S3Uri": desired.model_data,
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            }
        _create_unless_made(
            self.client.create_model,
            ModelName=resource,
            PrimaryContainer=container,
            ExecutionRoleArn=desired.role,
        )

    def _create_configuration(self, resource: str, desired: DesiredEndpoint) -> None:
        variant: dict[str, Any] = {
            "VariantName": VARIANT,
            "ModelName": resource,
            "InstanceType": desired.instance_type,
            "InitialInstanceCount": desired.instances,
            "ContainerStartupHealthCheckTimeoutInSeconds": desired.startup_s,
            "ModelDataDownloadTimeoutInSeconds": desired.startup_s,
            # The gateway refuses with 429 what it cannot take: send to the least busy.
            "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
        }
        if ami_version := desired.ami_version():
            variant["InferenceAmiVersion"] = ami_version
        _create_unless_made(
            self.client.create_endpoint_config,
            EndpointConfigName=resource,
            ProductionVariants=[variant],
        )

    def _update(self, before: str, resource: str, instances: int) -> None:
        """Move the endpoint to another configuration. It keeps as many instances as scaling gave
        it, unless another number of them is asked for than in the configuration before."""
        earlier = self.client.describe_endpoint_config(EndpointConfigName=before)
        counts = [variant["InitialInstanceCount"] for variant in earlier["ProductionVariants"]]
        overridden = [] if counts == [instances] else ["DesiredInstanceCount"]
        self.client.update_endpoint(
            EndpointName=self.name,
            EndpointConfigName=resource,
            RetainAllVariantProperties=True,
            ExcludeRetainedVariantProperties=[{"VariantPropertyType": name} for name in overridden],
        )

    def _delete_parts(self, resource: str) -> None:
        self.client.delete_endpoint_config(EndpointConfigName=resource)
        self.client.delete_model(ModelName=resource)


def _create_unless_made(create: Callable[..., Any], **arguments: Any) -> None:
    """Create a model or a configuration, unless there is one of its name: a hash of what it holds.

    One is left by a deployment that failed.
    """
    from botocore.exceptions import ClientError

    try:
        create(**arguments)
    except ClientError as error:
        if "already existing" not in error.response["Error"]["Message"]:
            raise


def _reason(description: Mapping[str, Any]) -> str:
    return str(description.get("FailureReason", "no reason given"))


def invoke(runtime: Any, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """One answer of the endpoint. `runtime` is boto3's client `sagemaker-runtime`."""
    response = runtime.invoke_endpoint(
        EndpointName=name, ContentType="application/json", Body=json.dumps(dict(body))
    )
    answer: dict[str, Any] = json.loads(response["Body"].read())
    return answer


def stream(runtime: Any, name: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer. Raises DeployError for an error event.

    SageMaker cuts the stream into parts of any size, so that a part may end within a line, or
    within the bytes of a letter.
    """
    response = runtime.invoke_endpoint_with_response_stream(
        EndpointName=name,
        ContentType="application/json",
        Body=json.dumps({**body, "stream": True}),
    )
    left = b""
    for part in response["Body"]:
        if "PayloadPart" not in part:
            raise DeployError(f"the stream broke: {part}")
        left += part["PayloadPart"]["Bytes"]
        *lines, left = left.split(b"\n")
        for line in lines:
            text = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or text == b"[DONE]":
                continue
            event: dict[str, Any] = json.loads(text)
            if "error" in event:
                raise DeployError(f"{name}: {event['error'].get('message')}")
            yield event
