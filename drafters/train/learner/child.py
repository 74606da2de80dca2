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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from drafters.learning import WORK, captured
from drafters.learning.captured import Captured
from drafters.learning.lineage import CANDIDATE, Lineage
from drafters.parent_death import end_with_parent
from drafters.train.learner.options import learn_parser
from drafters.train.learner.round_folder import RoundFolder
from drafters.train.learner.sequences import content, cut, unusable

_LOOK_S = 15.0  # between looks for new data


def main(argv: Sequence[str] | None = None) -> int:
    """Make one candidate; returns the exit code."""
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
            if work.count_attempt():
                break
            print("learner: the round failed too often: given up", file=sys.stderr, flush=True)
        from drafters.train.learner.round import Round

        generation = Round(args, work).run()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        print(f"learner: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"learner: generation {generation.number} is {generation.verdict}", flush=True)
    return 0


def _wait_for_data(args: argparse.Namespace, work: RoundFolder) -> None:
    """Return once enough answers are new, and no candidate waits for its trial."""
    lineage, new_tokens, told = Lineage(args.folder), _NewTokens(args), False
    while True:
        newest = lineage.generations()[-1:]
        # One that drafts has been tried, though a kill may have come before its verdict.
        if newest and newest[0].verdict == CANDIDATE and newest[0].number > lineage.in_force():
            reason = f"generation {newest[0].number} has not been tried in service"
        else:
            new = new_tokens.count(work.since())
            if new >= args.new_tokens:
                return
            reason = f"{new} of {args.new_tokens} new tokens of answers"
        if not told:
            print(f"learner: waiting: {reason}", flush=True)
        told = True
        time.sleep(_LOOK_S)


class _NewTokens:
    """Counts tokens of answers that a round could use, and none has looked at: what is asked again
    and gets the same answer teaches nothing new."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder = args.folder / captured.FOLDER
        self._max_length = args.max_length
        self._since: float | None = None
        self._old: set[tuple[str, bytes]] = set()  # tenants and contents up to then

    def count(self, since: float) -> int:
        """Those that ended after `since`, in seconds since 1970, and not in the future: a clock
        that was wrong would make them new for ever."""
        if since != self._since:
            everything = captured.read(self._folder)
            self._old = set(self._contents(item for item in everything if item.at <= since))
            self._since = since
        now = time.time()
        new = captured.read(self._folder, since)
        contents = self._contents(item for item in new if item.at <= now)
        return sum(tokens for key, tokens in contents.items() if key not in self._old)

    def _contents(self, items: Iterable[Captured]) -> dict[tuple[str, bytes], int]:
        """The tokens of each different answer to a prompt of a tenant."""
        tokens: dict[tuple[str, bytes], int] = {}
        for item in items:
            if not unusable(item, math.inf, self._max_length):
                usable = cut(item, self._max_length)
                tokens[usable.tenant, content(usable)] = len(usable.answer)
        return tokens


def _take_least() -> None:
    """Give way to everything else on this machine: processors, and memory if it runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
