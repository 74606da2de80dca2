"""The Terraform files: formatted, every variable declared and used. Validating them needs AWS's
provider, which is not fetched here (docs/sagemaker.md says what was checked otherwise)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.settings import REPOSITORY
from deploy.sagemaker.endpoint import DesiredEndpoint

FOLDER = REPOSITORY / "deploy" / "sagemaker" / "terraform"
TERRAFORM = shutil.which("terraform")


def test_variables_are_declared_and_used() -> None:
    text = "\n".join(file.read_text("utf-8") for file in FOLDER.glob("*.tf"))
    declared = set(re.findall(r'^variable "([a-z_]+)"', text, re.MULTILINE))
    assert declared == set(re.findall(r"\bvar\.([a-z_]+)", text))
    assert {"name", "image", "role_arn", "instance_type", "preset"} <= declared


def test_what_makes_a_new_configuration_is_in_its_name() -> None:
    """SageMaker cannot change one: a second of the same name would be refused."""
    text = (FOLDER / "main.tf").read_text("utf-8")
    mark = text[text.index("mark = ") : text.index("resource = ")]
    first, last = '"aws_sagemaker_model"', '"aws_sagemaker_endpoint"'
    held = text[text.index(first) : text.index(last)]
    values = set(re.findall(r"\b(?:var|local)\.([a-z_]+)", held))
    assert values - {"resource"} <= set(re.findall(r"\b(?:var|local)\.([a-z_]+)", mark))


@pytest.mark.skipif(TERRAFORM is None, reason="terraform is not installed")
@pytest.mark.parametrize("instance_type", ["ml.p5.4xlarge", "ml.g6e.2xlarge", "ml.c5.4xlarge"])
@pytest.mark.parametrize("given", [None, "", "al2-ami-sagemaker-inference-gpu-3-1"])
def test_the_host_image_is_that_of_the_command(
    instance_type: str, given: str | None, tmp_path: Path
) -> None:
    """Evaluated without the resources, as those need AWS's provider."""
    text = (FOLDER / "main.tf").read_text("utf-8")
    (values,) = re.findall(r"^locals \{.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "main.tf").write_text(values)
    shutil.copy(FOLDER / "variables.tf", tmp_path)
    variables = {"name": "aerie", "image": "i", "role_arn": "r", "instance_type": instance_type}
    if given is not None:
        variables["inference_ami_version"] = given
    (tmp_path / "terraform.tfvars.json").write_text(json.dumps(variables))
    done = subprocess.run(
        [str(TERRAFORM), f"-chdir={tmp_path}", "console"],
        input="local.inference_ami_version\n",
        env={**os.environ, "TF_CLI_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    desired = DesiredEndpoint("aerie", "i", "r", instance_type, inference_ami_version=given)
    assert json.loads(done.stdout) == desired.ami_version()


@pytest.mark.skipif(TERRAFORM is None, reason="terraform is not installed")
def test_they_are_formatted() -> None:
    done = subprocess.run(
        [str(TERRAFORM), f"-chdir={FOLDER}", "fmt", "-check", "-diff"],
        env={**os.environ, "TF_CLI_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
