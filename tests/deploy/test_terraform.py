"""The Terraform files: formatted, every variable declared and used. Validating them needs AWS's
provider, which is not fetched here (docs/sagemaker.md says what was checked otherwise)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from app.settings import REPOSITORY

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
def test_they_are_formatted() -> None:
    done = subprocess.run(
        [str(TERRAFORM), f"-chdir={FOLDER}", "fmt", "-check", "-diff"],
        env={**os.environ, "TF_CLI_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
