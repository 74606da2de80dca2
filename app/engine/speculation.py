"""The request field `speculation`: how many tokens may be drafted for this request."""

from __future__ import annotations

from typing import Any

from app.engine.strict import invalid
from drafters.config import MAX_K

FIELD = "speculation"
GENERATES = ("chat", "completions", "responses", "messages")  # the dialects that have it


def take_limit(payload: dict[str, Any]) -> None:
    """Replace `speculation` by what carries it to the engine, an entry of `vllm_xargs`.

    `{"max_k": n}` bounds the draft tokens in a step, `{"enabled": false}` means none. The text
    is the same either way. Raises ApiError 400 for anything else, there and in the entry itself.
    """
    extra = payload.get("vllm_xargs")
    if isinstance(extra, dict) and MAX_K in extra:
        _check_count(extra[MAX_K], f"vllm_xargs.{MAX_K}")
    asked = payload.pop(FIELD, None)
    if asked is None:
        return
    if not isinstance(asked, dict):
        raise invalid(FIELD, f"'{FIELD}' must be an object.")
    for name in asked:
        if name not in ("max_k", "enabled"):
            raise invalid(f"{FIELD}.{name}", f"'{FIELD}' takes 'max_k' and 'enabled' only.")
    limit, enabled = asked.get("max_k"), asked.get("enabled", True)
    if not isinstance(enabled, bool):
        raise invalid(f"{FIELD}.enabled", f"'{FIELD}.enabled' must be true or false.")
    if limit is not None:
        _check_count(limit, f"{FIELD}.max_k")
    if not enabled:
        limit = 0
    if limit is None:
        return
    if extra is None:
        extra = payload["vllm_xargs"] = {}
    if isinstance(extra, dict):  # anything else is refused where fields are checked
        if MAX_K in extra:
            raise invalid(FIELD, f"'{FIELD}' and 'vllm_xargs.{MAX_K}' exclude each other.")
        extra[MAX_K] = limit


def _check_count(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(where, f"'{where}' must be a whole number, 0 or more.")
