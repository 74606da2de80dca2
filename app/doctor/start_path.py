"""How the engine starts: planned for these settings, and as it was in a running gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from app.doctor.report import Finding, fail, ok, warn
from app.engine.configuration.runner import V2, StartPath, runner_wish, start_plan
from app.errors import StartupError
from app.settings import Settings

TIMEOUT_S = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to listen on -> one to connect to


def check_plan(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    on_cpu: bool,
    without_lookups: bool = False,
) -> Finding:
    """The finding about the paths that a start tries, in their order.

    `without_lookups`: there is no head, and the start leaves lookups out for this target.
    """
    try:
        plan = start_plan(settings, on_cpu=on_cpu, wish=runner_wish(environ))
    except StartupError as error:
        return fail("start path", str(error), f"unset {V2}")
    if without_lookups:
        if plan.strict:
            detail = "no lookups for a model with recurrent layers, and strict_speculation is set"
            return fail("start path", detail, "--lookup-k N to have lookups, or --k 0")
        plan = replace(plan, paths=plan.paths[plan.paths.index(StartPath.NO_DRAFTS) :])
    detail = f"{plan.first}: {plan.first.description}"
    others = [path for path in plan.paths[1:] if not (path is StartPath.V1 and not on_cpu)]
    if others and plan.strict:
        detail += "; exits if it does not start (strict_speculation)"
    elif others:
        detail += f"; if it does not start: {' or '.join(others)}"
    if absent := plan.first.absent_sources(settings):
        detail += f"; no drafts by {' or '.join(absent)} there ({V2}=0 has them)"
    return ok("start path", detail)


def running(host: str, port: int) -> dict[str, Any] | None:
    """What the gateway that listens there says of its readiness; None if there is no gateway."""
    address = _ANY.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}/readyz"
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
            document = json.load(answer)
    except HTTPError as error:
        with error:
            try:
                document = json.load(error)
            except ValueError:
                return None
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "phase" in document else None


def check_running(state: Mapping[str, Any]) -> Finding:
    """The finding about a running gateway, from what it says of its readiness (`running`)."""
    path = state.get("path")
    if not isinstance(path, Mapping):
        return warn("gateway", f"runs here, {state['phase']}", "wait until it is ready, or stop it")
    if path["reason"] in ("none", "unsupported"):
        return ok("gateway", f"runs here, on {path['name']}")
    return warn(
        "gateway",
        f"runs here, on {path['name']} instead of its first choice ({path['reason']})",
        "its log and GET /v1/speculation have the message; docs/alerts.md#speculationfellback",
    )
