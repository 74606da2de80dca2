"""The file of results of a part, written anew with everything that is added to it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

RUNNING, PASSED, FAILED, TIMED_OUT, SKIPPED = "running", "passed", "failed", "timed out", "skipped"


class PartReport:
    """Results of one part in OUT/NAME.json, which a killed check leaves as far as the part came.

    The file has `part`, `status`, `seconds`, `says` (a line for the last table), `provenance`,
    `results`, `skipped` (what this device cannot do, and why), `failures` and `table` (lines).
    """

    def __init__(self, file: Path, part: str, device: str) -> None:
        self.file, self.device = file, device
        self.document: dict[str, Any] = {
            "part": part, "device": device, "status": RUNNING, "seconds": 0.0, "says": "",
            "provenance": {}, "results": {}, "skipped": [], "failures": [], "table": [],
        }  # fmt: skip

    @classmethod
    def read(cls, file: Path, part: str, device: str) -> PartReport:
        """The report in `file`; an empty one if the part did not come so far as to write it."""
        report = cls(file, part, device)
        if file.exists():
            report.document |= json.loads(file.read_text("utf-8"))
        return report

    @property
    def on_cpu(self) -> bool:
        """Whether this is a rehearsal, with sizes for a CPU."""
        return self.device == "cpu"

    @cached_property
    def folder(self) -> Path:
        """A temporary folder for files of this part alone, which ends with this process."""
        folder = Path(tempfile.mkdtemp(prefix="aerie-gpu-check-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def add(self, **results: Any) -> None:
        """Add results by name."""
        self.document["results"] |= results
        self.write()

    def skip(self, what: str, why: str) -> None:
        """Note what this device cannot do."""
        self.document["skipped"].append({"what": what, "why": why})
        self.write()

    def fail(self, what: str) -> None:
        """Note a failure after which the part can go on."""
        self.document["failures"].append(what)
        self.write()

    def show(self, lines: Iterable[str], says: str = "", *, anew: bool = False) -> None:
        """Add lines to the part's table, or replace it if it is shown `anew`; `says` is its line
        in the last table."""
        kept = [] if anew else self.document["table"]
        self.document["table"] = [*kept, *lines]
        self.document["says"] = says or self.document["says"]
        self.write()

    def end(self, status: str, seconds: float, says: str = "") -> None:
        """Say how the part ended."""
        self.document |= {"status": status, "seconds": round(seconds, 1)}
        self.document["says"] = says or self.document["says"]
        self.write()

    def set_provenance(self, provenance: Mapping[str, Any]) -> None:
        """Say where and with which versions the part ran."""
        self.document["provenance"] = dict(provenance)
        self.write()

    def write(self) -> None:
        """Replace the file by one rename, so that a kill leaves the old or the new one whole."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.document, indent=1) + "\n", "utf-8")
        os.replace(partial, self.file)
