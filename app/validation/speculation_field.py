"""The request field `speculation`: how many tokens may be drafted for this request, and whether
its answer says where each token comes from."""

from __future__ import annotations

import json
from typing import Any

from app.validation.field_checks import invalid
from drafters.config import MAX_K, REPORT_STEPS, REPORT_TOKENS

FIELD = "speculation"
MEMBERS = ("enabled", "max_k", "tokens")
# With these an answer's text is not that of its tokens, or shall not show all of them.
_NOT_WITH_TOKENS = {"echo": True, "include_reasoning": False, "use_beam_search": True}


def take_options(
    payload: dict[str, Any], *, reports_token_origins: bool = True, server_reports: bool = True
) -> None:
    """Replace `speculation` by the entries of `vllm_xargs` that carry it to the engine.

    `{"max_k": n}` bounds the draft tokens in a step, `{"enabled": false}` means none. The text is
    the same either way. `{"tokens": true}` asks where each token comes from:
    `reports_token_origins` is whether the API can say that, `server_reports` whether this server
    can. Raises ApiError 400 for anything else, here and in the entries themselves.
    """
    extra = payload.get("vllm_xargs")
    if isinstance(extra, dict) and MAX_K in extra:
        _check_count(extra[MAX_K], f"vllm_xargs.{MAX_K}")
    if isinstance(extra, dict) and REPORT_TOKENS in extra:
        raise invalid(f"vllm_xargs.{REPORT_TOKENS}", f"Use '{FIELD}.tokens' instead.")
    if isinstance(extra, dict) and REPORT_STEPS in extra:
        raise invalid(f"vllm_xargs.{REPORT_STEPS}", "It is the gateway's own.")
    asked = payload.pop(FIELD, None)
    if asked is None:
        return
    if not isinstance(asked, dict):
        raise invalid(FIELD, f"'{FIELD}' must be an object.")
    for name in asked:
        if name not in MEMBERS:
            known = ", ".join(f"'{member}'" for member in MEMBERS)
            raise invalid(f"{FIELD}.{name}", f"'{FIELD}' takes {known} only.")
    entries: dict[str, int] = {}
    limit, enabled, tokens = asked.get("max_k"), asked.get("enabled", True), asked.get("tokens")
    if not isinstance(enabled, bool):
        raise invalid(f"{FIELD}.enabled", f"'{FIELD}.enabled' must be true or false.")
    if limit is not None:
        _check_count(limit, f"{FIELD}.max_k")
        entries[MAX_K] = limit
    if not enabled:
        entries[MAX_K] = 0
    if not isinstance(tokens, bool | None):
        raise invalid(f"{FIELD}.tokens", f"'{FIELD}.tokens' must be true or false.")
    if tokens:
        _check_can_report(payload, reports_token_origins, server_reports)
        entries[REPORT_TOKENS] = 1
    if not entries:
        return
    if extra is None:
        extra = payload["vllm_xargs"] = {}
    if isinstance(extra, dict):  # anything else is refused where fields are checked
        if MAX_K in extra and MAX_K in entries:
            raise invalid(FIELD, f"'{FIELD}' and 'vllm_xargs.{MAX_K}' exclude each other.")
        extra.update(entries)


def _check_can_report(
    payload: dict[str, Any], reports_token_origins: bool, server_reports: bool
) -> None:
    """Refuse token origins where they would not be exact, or the server cannot report them."""
    name = f"{FIELD}.tokens"
    if not reports_token_origins:
        message = f"'{name}' is supported by chat and text completions only."
        raise invalid(name, message, "unsupported_parameter")
    if not server_reports:
        message = f"'{name}' is not supported: this server does not report its drafts."
        raise invalid(name, message, "unsupported_parameter")
    for field, value in _NOT_WITH_TOKENS.items():
        if payload.get(field) is value:
            raise invalid(name, f"'{name}' and '{field}': {json.dumps(value)} exclude each other.")


def _check_count(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(where, f"'{where}' must be a whole number, 0 or more.")
