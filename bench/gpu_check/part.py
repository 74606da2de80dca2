"""The process of one part: `python -m bench.gpu_check.part NAME --device DEVICE --file FILE`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check.check import ends_by_sigterm
from bench.gpu_check.part_report import PartReport
from bench.gpu_check.parts import DEVICES, PARTS, Part
from bench.provenance import provenance


def run(argv: Sequence[str]) -> int:
    """Run the part; returns the exit code. An error is in its report and on standard error.

    SIGTERM is a SystemExit, so that a part that is ended for time adds what it has measured.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check.part", description=__doc__)
    parser.add_argument("name", choices=[part.name for part in PARTS])
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--file", type=Path, required=True)
    args = parser.parse_args(argv)
    (part,) = (part for part in PARTS if part.name == args.name)
    report = PartReport(args.file, part.name, args.device)
    report.set_provenance(_provenance(part, args.device))
    if report.on_cpu:
        from app.engine.configuration import cpu

        os.environ.update(cpu.environment(os.environ))
    module, _, function = part.body.partition(":")
    try:
        with ends_by_sigterm():
            getattr(importlib.import_module(f"bench.gpu_check.{module}"), function)(report)
    except Exception as error:
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {error}"[:400])
        return 1
    return 0


def _provenance(part: Part, device: str) -> dict[str, Any]:
    found = provenance(["gpu-check", "--device", device, "--parts", part.name])
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
