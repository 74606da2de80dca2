"""Keeps the tenants' entries of the prefix cache apart.

vLLM finds cached blocks of a prompt by a hash over their tokens and a salt. With one salt for all,
the time to the first token reveals to each tenant which prompts others have sent.
"""

from __future__ import annotations

import hashlib


def tenant_cache_salt(tenant: str, requested: str | None) -> str:
    """The salt of a request, from its tenant and from the salt that the client `requested`.

    The client's salt divides its tenant's entries further and never reaches another tenant's: a
    tenant's name holds no NUL, so that no two pairs have the same salt. Replicas that share a cache
    compute the same one.
    """
    return hashlib.sha256(f"{tenant}\0{requested or ''}".encode()).hexdigest()
