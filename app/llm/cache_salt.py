"""Keeps the tenants' entries of the prefix cache apart.

vLLM finds the blocks of a prompt again by a hash over their tokens and a salt. With one salt for
all, the time to the first token tells each tenant which prompts others have sent.
"""

from __future__ import annotations

import hashlib


def tenant_cache_salt(tenant: str, requested: str | None) -> str:
    """The salt of a tenant's request. What a client asks for divides its own entries further, and
    reaches no one else's: no two pairs of tenant and `requested` have the same salt, as a tenant's
    name holds no NUL. It depends on nothing else, so that replicas with a common cache agree."""
    return hashlib.sha256(f"{tenant}\0{requested or ''}".encode()).hexdigest()
