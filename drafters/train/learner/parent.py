"""Train a head further on the traffic that `aerie serve --learn DIR` captures.

A candidate is trained from the head in force, on captured answers and on the texts that the head
was made from. It is compared with the head in force on answers that were held back, and written to
DIR/generations. A gateway with --learn DIR tries it in service; `aerie heads` shows and chooses.

Beside a gateway it computes while that answers nothing, and stops within a tenth of a second when a
request comes. It may be killed at any time: the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from drafters.learning import WORK, load_signal
from drafters.learning.load_signal import Activity
from drafters.parent_death import request_death_signal
from drafters.streams import unfailing
from drafters.train.learner.options import learn_parser, option_problem
from drafters.train.learner.pacing import TICK_S, Pacing
from drafters.train.learner.round_folder import RoundFolder

CHILD = "drafters.train.learner.child"
_LOCK_WAIT_S = 5.0  # the child of a learner that was killed ends a moment after it
_BACKOFF_S = (1.0, 60.0)  # the first wait after a child that failed, and the longest
_MOST_FAILURES = 3  # of children in a row, with --forever

# Exit codes of a child that crashed: a signal that it caused itself.
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)


class _Stopped(Exception):
    """A signal asks the process to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aerie learn`; returns the exit code, 2 for wrong options."""
    unfailing()  # it trains on when nobody reads its log, or the disk under it is full
    argv = list(sys.argv[1:] if argv is None else argv)
    args = learn_parser(__doc__).parse_args(argv)
    if problem := option_problem(args):
        print(f"aerie learn: {problem}", file=sys.stderr)
        return 2
    lock = _lock(args.folder / WORK)
    if lock is None:
        print(f"aerie learn: another learner works on {args.folder}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _stop)
    try:
        return _learn(args, argv, lock)
    except _Stopped:
        return 0
    finally:
        os.close(lock)


def _learn(args: argparse.Namespace, argv: Sequence[str], lock: int) -> int:
    """Have one child after another make a candidate each, until enough were made. Returns the exit
    code: 1 after too many failures in a row, which whoever started this learner is to notice."""
    deadline = time.monotonic() + 60.0 * args.minutes if args.minutes is not None else None
    pacing, made, failures, wait = Pacing(args.when, args.share), 0, 0, _BACKOFF_S[0]
    # -P: a module of the working directory is not to stand in for one of Python's.
    command = [sys.executable, "-P", "-m", CHILD, *argv, f"--child-of={os.getpid()}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    while made != args.rounds:
        while not (is_over := _is_over(deadline)):
            if pacing.may_have_process(_activity(args.folder)):
                break
            time.sleep(TICK_S)
        if is_over:
            return 0
        # The lock is held by whichever of the two ends last. The child ends with its parent from
        # the beginning: it may be stopped before its first line.
        child = subprocess.Popen(
            command, env=environment, pass_fds=[lock], preexec_fn=request_death_signal
        )
        killed_for_memory = _killed_for_memory()
        try:
            code = _pace(child, pacing, args.folder, deadline)
        finally:
            child.kill()
            child.wait()
        if code is None:
            continue
        if code == 0:
            made, failures, wait = made + 1, 0, _BACKOFF_S[0]
            continue
        failures += 1
        lacked_memory = code == -signal.SIGKILL and _killed_for_memory() > killed_for_memory
        if lacked_memory or code in _CRASHES:
            with suppress(OSError):  # a full disk
                RoundFolder(args.folder / WORK).count_failure()
        if _is_over(deadline, wait):
            return 0
        if args.forever and failures == _MOST_FAILURES:
            print(f"learner: ended with {code}, {failures} times in a row", file=sys.stderr)
            return 1
        print(f"learner: ended with {code}, again in {wait:.0f} s", file=sys.stderr, flush=True)
        time.sleep(wait)
        wait = min(2 * wait, _BACKOFF_S[1])
    return 0


def _pace(
    child: subprocess.Popen[bytes], pacing: Pacing, folder: Path, deadline: float | None
) -> int | None:
    """Stop and continue a child as the load allows; returns its exit code. None at the deadline, or
    when the learner may have no process that trains."""
    runs = True
    while (code := child.poll()) is None:
        activity = _activity(folder)
        if _is_over(deadline) or not pacing.may_have_process(activity):
            return None
        if pacing.may_run(activity, time.monotonic()) != runs:
            child.send_signal(signal.SIGSTOP if runs else signal.SIGCONT)
            runs = not runs
        time.sleep(TICK_S)
    return code


def _is_over(deadline: float | None, wait_s: float = 0.0) -> bool:
    """Whether the deadline has passed, or will have in `wait_s` seconds."""
    return deadline is not None and time.monotonic() + wait_s > deadline


def _killed_for_memory() -> int:
    """How many processes the kernel has killed so far for want of memory (proc_vmstat(5))."""
    with suppress(OSError), open("/proc/vmstat", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _activity(folder: Path) -> Activity:
    """What the gateway does; BUSY where that cannot be read."""
    try:
        load = load_signal.read(folder)
        return Activity.IDLE if load is None else load.activity
    except (OSError, ValueError):
        return Activity.BUSY


def _lock(folder: Path) -> int | None:
    """A descriptor that keeps other learners away from a folder; None if one is there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() - began > _LOCK_WAIT_S:
                os.close(descriptor)
                return None
            time.sleep(TICK_S)
        else:
            return descriptor


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # once is enough: what follows ends the child
    raise _Stopped
