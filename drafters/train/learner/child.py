"""The learner's child: waits for data, makes one candidate, and ends.

It ends, so that its memory is free while there is nothing to learn. torch is imported only once
there is.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drafters.learning import WORK, captured
from drafters.learning.lineage import CANDIDATE, Lineage
from drafters.parent_death import end_with_parent
from drafters.train.learner.options import learn_parser
from drafters.train.learner.round_folder import RoundFolder

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
    lineage, told = Lineage(args.folder), False
    while True:
        newest = lineage.generations()[-1:]
        # One that drafts has been tried, though a kill may have come before its verdict.
        if newest and newest[0].verdict == CANDIDATE and newest[0].number > lineage.in_force():
            reason = f"generation {newest[0].number} has not been tried in service"
        else:
            new = _new_tokens(args.folder / captured.FOLDER, work.since())
            if new >= args.new_tokens:
                return
            reason = f"{new} of {args.new_tokens} new tokens of answers"
        if not told:
            print(f"learner: waiting: {reason}", flush=True)
        told = True
        time.sleep(_LOOK_S)


def _new_tokens(folder: Path, since: float) -> int:
    """How many tokens of answers were captured after `since`, and not in the future: a clock that
    was wrong would make them new for ever."""
    now = time.time()
    return sum(
        len(sequence.answer) for sequence in captured.read(folder, since) if sequence.at <= now
    )


def _take_least() -> None:
    """Give way to everything else on this machine: processors, and memory if it runs out."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
