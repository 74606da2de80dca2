"""Traces of a moving load: stages with a number of users and of requests. A stage ends when its
requests are sent, not at a time, so that all methods answer the same requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`requests` of `users`, who send the next one as soon as one is answered."""

    users: int
    requests: int


def stages(name: str, requests: int) -> list[Stage]:
    """The trace of this name, with `requests` in each stage; ValueError for an unknown name."""
    if name == "steps":
        return [Stage(users, max(requests, users)) for users in (1, 4, 16, 48, 16, 4, 1)]
    if name == "burst":
        return [Stage(users, max(requests, users)) for users in (1, 48, 1)]
    if name == "visits":
        return [Stage(users, max(requests, users)) for users in (1, 8, 2, 16, 1)]
    raise ValueError(f"no trace {name!r}: steps, burst, visits")


def limits(trace: list[Stage]) -> list[int]:
    """How many requests may run at once when each request is sent (see `closed_loop`)."""
    return [stage.users for stage in trace for _ in range(stage.requests)]
