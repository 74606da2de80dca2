"""Traces: stages of so many users and so many requests. Work moves them on, not time, so that every
method gets through the same requests, and only how long it takes differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`requests` by `users` who ask again at once."""

    users: int
    requests: int


def stages(name: str, requests: int) -> list[Stage]:
    """A trace by name, with `requests` in each stage. ValueError for an unknown one."""
    if name == "steps":
        return [Stage(users, max(requests, users)) for users in (1, 4, 16, 48, 16, 4, 1)]
    if name == "burst":
        return [Stage(users, max(requests, users)) for users in (1, 48, 1)]
    raise ValueError(f"no trace {name!r}: steps, burst")


def limits(trace: list[Stage]) -> list[int]:
    """For each request, how many may run at once when it is sent."""
    return [stage.users for stage in trace for _ in range(stage.requests)]
