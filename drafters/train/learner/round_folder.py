"""What a round has made so far, in a folder that a kill at any point leaves usable.

    work/since.json     time of the newest sequence that a round has looked at
    work/failures.json  how often its phase failed
    work/round/         texts, the saved training, the candidate

The plan of a round is written last when it begins and read first when it goes on. Whatever lies in
the folder without a plan is left over.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.learning.first_head import is_another_head
from drafters.learning.json_file import read_json, replace_json
from drafters.learning.lineage import Lineage

SINCE = "since.json"
SAVED = "resume-"  # begins the name of a file of saved training, which ends in .pt
UNFINISHED = ".new"  # ends the name of a folder that a phase fills
_PLAN, _FAILURES = "plan.json", "failures.json"
_MOST_FAILURES = 10  # of one phase: whatever ends it again and again would do so for ever


class RoundFolder:
    """The files of a round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lineage = Lineage(folder.parent)
        self.round = folder / "round"

    def since(self) -> float:
        """When the newest sequence ended that a round has looked at; seconds since 1970.

        A time to come was written by a clock that was ahead. It becomes now, on disk too: nothing
        would be new until then.
        """
        since = float((read_json(self._folder / SINCE) or {"since": 0.0})["since"])
        now = time.time()
        if since > now:
            replace_json(self._folder / SINCE, {"since": now})
        return min(since, now)

    def plan(self) -> dict[str, Any] | None:
        """The plan of the round that goes on; None if none does, or if it was begun for another
        head or target than the gateway's (`first_head`)."""
        plan: dict[str, Any] | None = read_json(self.round / _PLAN)
        if plan is not None and plan.get("first_head") != self._lineage.first_head():
            return None
        return plan

    def drop_leftovers(self) -> None:
        """Free the space of what a failed attempt did not finish, and of a round that does not go
        on: on a full disk nothing can be written before."""
        if self.plan() is None:
            shutil.rmtree(self.round, ignore_errors=True)
            return
        for file in self.round.glob(f"{SAVED}*.tmp"):
            file.unlink()
        for folder in self.round.glob(f"*{UNFINISHED}"):
            shutil.rmtree(folder)

    def check_head(self, head: Path) -> None:
        """Raise ValueError if the gateway was started with another head than the one in the folder
        `head`. Reads it; raises OSError."""
        first_head = self._lineage.first_head()
        if first_head is not None and is_another_head(first_head, head):
            raise ValueError(f"the gateway was started with another head than --head {head}")

    def clear(self) -> Path:
        """An empty folder for a new round."""
        if self.round.exists():
            shutil.rmtree(self.round)
        self.round.mkdir(mode=0o700)
        return self.round

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Keep the plan: from now on a round goes on. It has `until`, as `since` will be."""
        replace_json(self.round / _PLAN, {**plan, "first_head": self._lineage.first_head()})
        self._forget_failures()

    def begin_attempt(self) -> bool:
        """Begin an attempt at a phase. A round whose phase failed too often is given up, with the
        data that it would have looked at, and False returned."""
        failures = self._failures()
        if failures >= _MOST_FAILURES:
            plan = self.plan()
            self.finish(time.time() if plan is None else plan["until"])
            return False
        replace_json(self._folder / _FAILURES, failures)  # and so when the attempt began
        return True

    def count_failure(self) -> None:
        """Count an attempt that failed by itself. One that is killed from outside, as with its
        gateway, says nothing of the round: it goes on as often as that happens."""
        replace_json(self._folder / _FAILURES, self._failures() + 1)

    def _failures(self) -> int:
        """How often this phase failed; none if training was saved since the last attempt began."""
        file = self._folder / _FAILURES
        if not file.exists():
            return 0
        began = file.stat().st_mtime_ns
        if any(saved.stat().st_mtime_ns > began for saved in self.round.glob(f"{SAVED}*.pt")):
            return 0
        return int(read_json(file) or 0)

    def _forget_failures(self) -> None:
        (self._folder / _FAILURES).unlink(missing_ok=True)

    def keep(self, made: Path, name: str) -> None:
        """Name a folder that a phase has filled: it appears whole, and outlives a power cut."""
        for file in made.rglob("*"):
            if file.is_file():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
        os.rename(made, self.round / name)
        self._forget_failures()

    def finish(self, until: float) -> None:
        """End the round: what it looked at is not new any more.

        Its files go first, as a full disk has no room for what is written; its plan goes last, as
        without one a kill in between would begin another round on the same data.
        """
        for path in self.round.glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _PLAN:
                path.unlink()
        replace_json(self._folder / SINCE, {"since": until})
        self._forget_failures()
        shutil.rmtree(self.round, ignore_errors=True)
