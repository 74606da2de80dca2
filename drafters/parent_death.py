"""Child processes that end with their parent, however the parent ends (Linux).

The kernel does it: PR_SET_PDEATHSIG (prctl(2)) has it send a child SIGKILL when its parent ends. No
handler, thread or lock of the child's interpreter takes part, so a child that is stuck in native
code ends as well. The call has two traps, which this module avoids:

- The signal is sent when the *thread* that made the child ends. So only children of threads that
  last as long as the process are guarded (`children_end_with_this_process`).
- A parent that ended before the call sends nothing. So the child checks its parent's id afterwards.

Another program's Python module runs as such a child with

    python -m drafters.parent_death PARENT MODULE [ARGUMENTS ...]
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Loaded here: a child must not look for libraries between fork and its first own line.
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_prctl.restype = ctypes.c_int


class _Forking(threading.local):
    """State of a thread that forks; its child inherits a copy."""

    guarded = False
    parent = 0


_forking = _Forking()


def request_death_signal(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal to this process when the thread that made it ends. Call it in the
    main thread: the request is the calling thread's."""
    if _prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent, the process `parent`, ends; now if it has ended."""
    request_death_signal()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_spawned() -> bool:
    """Whether `multiprocessing` spawned this process. `multiprocessing.parent_process` does not
    know while the child still imports its parent's main module."""
    return "--multiprocessing-fork" in sys.orig_argv


def end_with_multiprocessing_parent() -> None:
    """`end_with_parent` for a process that `multiprocessing` started. In any other process, and
    outside the main thread, nothing happens. Safe to call more than once."""
    parent = multiprocessing.parent_process()
    if parent is None or threading.current_thread() is not threading.main_thread():
        return
    assert parent.pid is not None
    end_with_parent(parent.pid)


@contextmanager
def children_end_with_this_process() -> Iterator[None]:
    """Children that this thread forks in here end with this process, and so do those that they
    fork in their main thread. The thread must last as long as the process.

    A child that `spawn` or `forkserver` makes runs no line of ours before it has imported this
    package: it calls `end_with_multiprocessing_parent` itself (drafters/vllm/plugin.py).
    """
    _guard_forks()
    before, _forking.guarded = _forking.guarded, True
    try:
        yield
    finally:
        _forking.guarded = before


@functools.cache  # hooks cannot be unregistered
def _guard_forks() -> None:
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def _before_fork() -> None:
    _forking.parent = os.getpid()


def _after_fork_in_child() -> None:
    if _forking.guarded:
        end_with_parent(_forking.parent)


def main() -> None:
    """Run a module as `python -m` does, in this process, which ends with its parent."""
    parent, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
