"""Generations of a head: which were trained from captured traffic, what was shown of each, and
which one drafts.

    generations/0001/config.json, model.safetensors, selector/, ...   the head
    generations/0001/provenance.json    parent, range of data, steps, figures of the replay
    generations/0001/trial.json         what came of its trial in service
    generations/newest                  the largest number that was given
    in_force                            the number of the generation that drafts
    pinned                              the number of one that an operator chose: nothing is tried
    first_head                          the head that they descend from, and its target
    target_since                        when that target took the place of another one
    loading                             the number of one that an engine reads for the first time

Files are replaced whole, by renaming, and a generation's folder appears with all of its content: a
kill at any point leaves what was there before or what was meant. Number 0 is the head that the
gateway was started with, and has no folder. A generation whose provenance cannot be read is none,
and a trial that cannot be read has not been: the others go on.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.learning.first_head import is_another_target
from drafters.learning.json_file import read_json, replace_json

logger = logging.getLogger(__name__)

FOLDER = "generations"
STARTED_WITH = 0  # the number of the head that the gateway was started with

# Verdicts on a generation.
CANDIDATE = "candidate"  # the replay favours it; service has not been asked yet
KEPT = "kept"
ROLLED_BACK = "rolled back"
REFUSED = "refused"  # the replay does not favour it: its weights are gone

# What a trial's verdict rests on: `by` of its record.
SERVICE = "service"
REPLAY = "replay"  # which favoured the candidate; service did not show it worse

_PROVENANCE, _TRIAL = "provenance.json", "trial.json"
RECORDS = (_PROVENANCE, _TRIAL)  # what a generation's folder has beside the head's own files
IN_FORCE, PINNED, FIRST_HEAD, LOADING = "in_force", "pinned", "first_head", "loading"
TARGET_SINCE = "target_since"
_NEWEST = f"{FOLDER}/newest"
_REFUSED = ".refused-"  # begins the name of a folder that becomes a refused generation's
MOST_CLOCK_SKEW_S = 3600.0  # between gateway and learner, on two machines
_WITH_WEIGHTS = 8  # generations, the newest ones that have weights, whose weights are kept


@dataclass(frozen=True)
class Generation:
    """A head that was trained further."""

    number: int
    folder: Path  # of the head's files
    provenance: Mapping[str, Any]
    trial: Mapping[str, Any] | None  # None until it was tried in service

    @property
    def verdict(self) -> str:
        """CANDIDATE, KEPT, ROLLED_BACK or REFUSED."""
        if self.trial is not None:
            return str(self.trial["verdict"])
        return str(self.provenance["verdict"])

    @property
    def replayed_against(self) -> int | None:
        """The number of the generation that the replay compared it with."""
        against: int | None = self.provenance.get("replay", {}).get("against")
        return against

    @property
    def kept_by_replay(self) -> bool:
        """Whether it was kept because service did not show it worse."""
        return self.trial is not None and self.trial.get("by") == REPLAY

    @property
    def has_weights(self) -> bool:
        """Whether the head's files are still there: not of refused ones, of old ones, nor of those
        that were removed."""
        try:
            return any(file.name not in RECORDS for file in self.folder.iterdir())
        except OSError:
            return False


class Lineage:
    """The generations in a folder of learning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._damaged: set[Path] = set()  # records that were told of

    def descend_from(self, first_head: str, older: Callable[[], str] = str) -> bool:
        """Say which head number 0 is. Returns whether it was another one, so that generation 0 is
        in force now, none is pinned and no candidate waits: the others descend from a head that is
        not there. A round of the learner that was begun for it is given up (`first_head`), and what
        was captured from another target is not used any more (`target_since`).

        `older` returns what an older version called this head, which is no other one.
        """
        before = self.first_head()
        if before == first_head:
            return False
        older_name = older()
        is_another = before not in (None, older_name)
        if before is not None and is_another:
            if all(is_another_target(before, name) for name in (first_head, older_name)):
                replace_json(self._folder / TARGET_SINCE, time.time())
            self.put_in_force(STARTED_WITH)
            self.pin(None)
            for generation in self.generations():
                if generation.verdict == CANDIDATE:
                    why = "the gateway was started with another head or target"
                    self.record_trial(generation.number, {"verdict": ROLLED_BACK, "refused": why})
        replace_json(self._folder / FIRST_HEAD, first_head)
        return is_another

    def target_since(self) -> float:
        """When the gateway was first started with its target, in seconds since 1970; 0 if it has
        had no other one.

        A time far ahead was written by a clock that was wrong. It becomes now, on disk too: nothing
        would be new until then. The clocks of two machines differ by less.
        """
        since, now = float(read_json(self._folder / TARGET_SINCE) or 0.0), time.time()
        if since <= now + MOST_CLOCK_SKEW_S:
            return since
        with suppress(OSError):
            replace_json(self._folder / TARGET_SINCE, now)
        return now

    def first_head(self) -> str | None:
        """Which head number 0 is, and its target; None before a gateway has said it."""
        first_head: str | None = read_json(self._folder / FIRST_HEAD)
        return first_head

    def generations(self) -> list[Generation]:
        """All generations, the oldest first. What cannot be read is logged and left out."""
        found = (self._read(self._place(number)) for number in self._numbers())
        return [generation for generation in found if generation is not None]

    def generation(self, number: int) -> Generation:
        """The generation of this number. Raises KeyError if there is none that can be read."""
        if (found := self._read(self._place(number))) is None:
            raise KeyError(number)
        return found

    def _read(self, folder: Path) -> Generation | None:
        """The generation in a folder; None if there is none that can be read."""
        provenance = self._record(folder / _PROVENANCE)
        if provenance is None:
            return None
        return Generation(int(folder.name), folder, provenance, self._record(folder / _TRIAL))

    def _record(self, file: Path) -> Mapping[str, Any] | None:
        """A record with its verdict; None if there is none, or a damaged one, which is logged
        once."""
        try:
            record = read_json(file)
            if record is None:
                return None
            if not isinstance(record, Mapping) or "verdict" not in record:
                raise ValueError(f"{file} is damaged: there is no verdict")
        except ValueError as error:
            if file not in self._damaged:
                logger.warning("%s; it is left out", error)
            self._damaged.add(file)
            return None
        return record

    def add(self, head: Path, provenance: Mapping[str, Any]) -> Generation:
        """Add the head in the folder `head`, which is moved, under the next number.

        `provenance` has a `verdict`, CANDIDATE or REFUSED. Of a refused head only the provenance is
        kept. Raises OSError.
        """
        number = self._largest_number() + 1
        place = self._place(number)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        for left in place.parent.glob(f"{_REFUSED}*"):  # by a kill
            shutil.rmtree(left)
        source = head
        if provenance["verdict"] == REFUSED:
            source = Path(tempfile.mkdtemp(dir=place.parent, prefix=_REFUSED))
        replace_json(source / _PROVENANCE, provenance)
        replace_json(self._folder / _NEWEST, number)
        os.rename(source, place)
        if source is not head:
            shutil.rmtree(head)
        return self.generation(number)

    def prune(self, keep: int = _WITH_WEIGHTS) -> None:
        """Delete the weights of all but the newest `keep` generations that have some, the one in
        force and the one that is pinned. What is known of them stays."""
        needed = {self.in_force(), self.pinned()}
        with_weights = [each for each in self.generations() if each.has_weights]
        for generation in with_weights[:-keep]:
            if generation.number in needed:
                continue
            for file in generation.folder.iterdir():
                if file.is_dir():
                    shutil.rmtree(file)
                elif file.name not in RECORDS:
                    file.unlink()

    def record_trial(self, number: int, trial: Mapping[str, Any]) -> None:
        """Keep what came of the trial of one: a `verdict`, KEPT or ROLLED_BACK, what it rests on
        (`by`, SERVICE or REPLAY) or why no head could be tried (`refused`), and figures."""
        replace_json(self.generation(number).folder / _TRIAL, trial)

    def in_force(self) -> int:
        """The number of the generation that drafts; of the first head if its folder was removed."""
        number = self._number(IN_FORCE) or STARTED_WITH
        return number if self._place(number).is_dir() else STARTED_WITH

    def put_in_force(self, number: int) -> None:
        """Say that the generation of this number drafts from now on, also after a restart."""
        replace_json(self._folder / IN_FORCE, number)

    def pinned(self) -> int | None:
        """The number of the generation that an operator chose; None if the proof chooses."""
        return self._number(PINNED)

    def pin(self, number: int | None) -> None:
        """Choose a generation, whatever was shown of it; None lets the proof choose again.

        Raises KeyError if there is no such generation, or its weights are gone.
        """
        if number not in (None, STARTED_WITH) and not self.generation(number).has_weights:
            raise KeyError(number)
        replace_json(self._folder / PINNED, number)

    def loading(self) -> int | None:
        """The number of the generation that was being loaded when its gateway ended; None if it
        ended otherwise."""
        return self._number(LOADING)

    def note_loading(self, number: int | None) -> None:
        """Say which generation an engine begins to load; None when that has ended. Raises
        OSError."""
        if number is None:
            (self._folder / LOADING).unlink(missing_ok=True)
        else:
            replace_json(self._folder / LOADING, number)

    def _numbers(self) -> list[int]:
        """The numbers of the folders of generations, ascending."""
        folders = (self._folder / FOLDER).glob("[0-9]*")
        return sorted(int(folder.name) for folder in folders if folder.name.isdigit())

    def _place(self, number: int) -> Path:
        return self._folder / FOLDER / f"{number:04d}"

    def _largest_number(self) -> int:
        """The largest number that was ever given, also to a generation that is removed since."""
        given = (self._number(name) for name in (_NEWEST, IN_FORCE, PINNED))
        return max([STARTED_WITH, *self._numbers(), *(number or 0 for number in given)])

    def _number(self, name: str) -> int | None:
        found = read_json(self._folder / name)
        return int(found) if found is not None else None
