"""The learner's child: waits for data, makes one candidate, and ends.

It ends, so that its memory is free while there is nothing to learn. torch is imported only once
there is.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drafters.learning import WORK, captured
from drafters.learning.lineage import CANDIDATE, Generation, Lineage
from drafters.parent_death import end_with_parent
from drafters.streams import unfailing
from drafters.train.learner.options import learn_parser
from drafters.train.learner.round_folder import RoundFolder
from drafters.train.learner.sequences import content, cut, unusable

_LOOK_S = 15.0  # between looks for new data
_SAY_AGAIN_S = 1800.0  # between lines of the log that differ in numbers alone


def main(argv: Sequence[str] | None = None) -> int:
    """Make one candidate; returns the exit code."""
    unfailing()  # it trains on when nobody reads its log, or the disk under it is full
    argv = list(sys.argv[1:] if argv is None else argv)
    args = learn_parser(__doc__).parse_args(argv)
    end_with_parent(args.child_of)
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal: the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    _take_least()
    os.umask(0o077)
    work = RoundFolder(args.folder / WORK)
    try:
        work.drop_leftovers()
        while True:
            if work.plan() is None:
                _wait_for_data(args, work)
            work.check_head(args.head)  # first: the wrong head is no reason to give a round up
            if work.begin_attempt():
                break
            print("learner: the round failed too often: given up", file=sys.stderr, flush=True)
        generation = _make_candidate(args, work)
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        print(f"learner: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"learner: generation {generation.number} is {generation.verdict}", flush=True)
    return 0


def _make_candidate(args: argparse.Namespace, work: RoundFolder) -> Generation:
    """Run the round; a failure is counted. Raises what Round.run raises."""
    try:
        from drafters.train.learner.round import Round

        return Round(args, work).run()
    except Exception:
        with suppress(OSError):  # of a full disk, as the failure may be
            work.count_failure()
        raise


def _wait_for_data(args: argparse.Namespace, work: RoundFolder) -> None:
    """Return once enough answers are new, and no candidate waits for its trial."""
    lineage, new_tokens, log = Lineage(args.folder), _NewTokens(args), _WaitLog()
    while True:
        newest = lineage.generations()[-1:]
        # One that drafts has been tried, though a kill may have come before its verdict.
        if newest and newest[0].verdict == CANDIDATE and newest[0].number > lineage.in_force():
            kind, reason = "trial", f"generation {newest[0].number} has not been tried in service"
        else:
            # What another target wrote is not new: no round takes it.
            new = new_tokens.count(max(work.since(), lineage.target_since()))
            if new >= args.new_tokens:
                return
            kind, reason = "tokens", f"{new} of {args.new_tokens} new tokens of answers"
            if left_out := new_tokens.too_long:
                kind = "too long"
                reason += f"; left out: {left_out} with prompts of more than {args.max_length} "
                reason += "tokens (--max-length; for `aerie serve`, --learn-max-length)"
        log.say(kind, reason)
        time.sleep(_LOOK_S)


class _WaitLog:
    """Says what the learner waits for: at once if that is of another kind than before, and after
    _SAY_AGAIN_S if its numbers have changed."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._kind = ""
        self._reason = ""
        self._said_at = -math.inf

    def say(self, kind: str, reason: str) -> None:
        now = self._steady()
        if kind == self._kind and (reason == self._reason or now - self._said_at < _SAY_AGAIN_S):
            return
        print(f"learner: waiting: {reason}", flush=True)
        self._kind, self._reason, self._said_at = kind, reason, now


@dataclass(frozen=True)
class _FileContent:
    """What a file of captured sequences has for a round."""

    version: tuple[int, int]  # its size, and when it was written: nanoseconds since 1970
    # Of each different answer to a prompt of a tenant: when the first one ended, and its tokens.
    answers: dict[tuple[str, bytes], tuple[float, int]]
    too_long: list[float]  # when those ended whose prompts are too long


class _NewTokens:
    """Counts tokens of answers that a round could use, and none has looked at: what is asked again
    and gets the same answer teaches nothing new.

    A file that did not change is not read again: there may be 256 MiB, which takes seconds.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder = args.folder / captured.FOLDER
        self._max_length = args.max_length
        self._files: dict[Path, _FileContent] = {}
        self.too_long = 0  # sequences that the last count left out, as their prompts are too long

    def count(self, since: float) -> int:
        """Those that ended after `since`, in seconds since 1970, and not in the future: a clock
        that was wrong would make them new for ever."""
        self._read_changed_files()
        now = time.time()
        ended = (at for file in self._files.values() for at in file.too_long)
        self.too_long = sum(since < at <= now for at in ended)
        firsts: dict[tuple[str, bytes], tuple[float, int]] = {}
        for file in self._files.values():
            for key, (at, tokens) in file.answers.items():
                firsts[key] = min(firsts.get(key, (math.inf, 0)), (at, tokens))
        return sum(tokens for at, tokens in firsts.values() if since < at <= now)

    def _read_changed_files(self) -> None:
        statuses = captured.files(self._folder)
        self._files = {file: known for file, known in self._files.items() if file in statuses}
        for file, status in statuses.items():
            version, known = (status.st_size, status.st_mtime_ns), self._files.get(file)
            if known is None or known.version != version:
                self._files[file] = self._read(file, version)

    def _read(self, file: Path, version: tuple[int, int]) -> _FileContent:
        found = _FileContent(version, {}, [])
        for item in captured.read_file(file):
            reason = unusable(item, math.inf, self._max_length)
            if reason == "too long":
                found.too_long.append(item.at)
            elif reason is None:
                usable = cut(item, self._max_length)
                key, tokens = (usable.tenant, content(usable)), len(usable.answer)
                first, _ = found.answers.get(key, (math.inf, 0))
                found.answers[key] = (min(first, item.at), tokens)
        return found


def _take_least() -> None:
    """Give way to everything else on this machine: processors, and memory if it runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
