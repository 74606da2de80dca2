"""Results as JSON lines, written as they come, so that a killed sweep can continue from its file.

Lines are of four kinds: `plan` (what is measured, and provenance; one for each start), `budget`
(requests of a cell at a concurrency), `cell` (one run of one method) and `counters` (what a server
counted since this start; the last line of a start holds, and files of before 2026-11-27 have none).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Facts of the provenance that change figures.
MEASURED_WITH = ("commit", "versions", "cpu", "cores", "gpus")


class JournalError(ValueError):
    """The file has results of another plan, source or machine, or is not a file of results."""


class Journal:
    """A file of results, with its contents."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.plan: dict[str, Any] | None = None
        self.provenance: dict[str, Any] = {}  # of the last start
        self.budgets: dict[int, int] = {}  # concurrency -> requests
        self.cells: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.counters: dict[int, dict[str, Any]] = {}  # number of the start -> increases
        self._starts = 0
        self._keep = 0  # bytes of whole lines
        if file.exists():
            self._read()

    def begin(self, plan: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Write this start to the file. Raises JournalError if it has results of another plan, or
        cells of another commit, other versions or another machine."""
        asked: dict[str, Any] = json.loads(json.dumps(plan))  # tuples are lists in the file
        if self.plan is not None and self.plan != asked:
            differ = sorted(k for k in {*asked, *self.plan} if asked.get(k) != self.plan.get(k))
            raise JournalError(
                f"{self._file} has results of another plan ({', '.join(differ)} differ): "
                "give the same options to continue, or another --out"
            )
        before, now = self.provenance, json.loads(json.dumps(provenance))
        differ = [name for name in MEASURED_WITH if before.get(name) != now.get(name)]
        if self.cells and differ:
            raise JournalError(
                f"{self._file} has results from elsewhere ({', '.join(differ)} differ: "
                f"{before.get(differ[0])} there, {now.get(differ[0])} now): give another --out, "
                "or remove the file"
            )
        if self._file.exists() and self._file.stat().st_size > self._keep:
            os.truncate(self._file, self._keep)  # the line that was being written at the kill
        self.plan, self.provenance = asked, dict(provenance)
        self._starts += 1
        self._write({"kind": "plan", "plan": asked, "provenance": dict(provenance)})

    def recorded_plan(self) -> dict[str, Any]:
        """The plan of the results. Raises JournalError if there are none."""
        if self.plan is None:
            raise JournalError(f"no results in {self._file}")
        return self.plan

    def of_another_command(self) -> JournalError:
        """The error that the results are not those of the command that reads them."""
        command = self.provenance.get("command", "another command")
        return JournalError(f"{self._file} has the results of `{command}`")

    def budget(self, concurrency: int, requests: int) -> None:
        """Write how many requests each cell at a concurrency has."""
        self.budgets[concurrency] = requests
        self._write({"kind": "budget", "concurrency": concurrency, "requests": requests})

    def add(self, key: tuple[Any, ...], cell: Mapping[str, Any]) -> None:
        """Write a cell. One with failed requests is not counted as done, and will run again."""
        self._write({"kind": "cell", "key": list(key), **cell})
        if not cell.get("failed"):
            self.cells[key] = dict(cell)

    def count(self, increases: Mapping[str, Any]) -> None:
        """Write what the server's counters grew by since this start; the newest line holds."""
        self.counters[self._starts] = dict(increases)
        self._write({"kind": "counters", "increases": dict(increases)})

    def _read(self) -> None:
        for line in self._file.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
                if not line.endswith(b"\n") or not isinstance(entry, dict):
                    break
            except ValueError:
                break
            self._keep += len(line)
            kind = entry.pop("kind", None)
            if kind == "plan":
                self.plan, self.provenance = entry["plan"], entry["provenance"]
                self._starts += 1
            elif kind == "budget":
                self.budgets[entry["concurrency"]] = entry["requests"]
            elif kind == "counters":
                self.counters[self._starts] = entry["increases"]
            elif kind == "cell":
                key = tuple(entry.pop("key"))
                if not entry.get("failed"):
                    self.cells[key] = entry
            else:
                raise JournalError(f"{self._file} has lines that are not results")
        if self.plan is None and self._file.stat().st_size:
            raise JournalError(f"{self._file} is not a file of results")

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry, allow_nan=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
