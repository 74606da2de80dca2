"""What a file of API keys holds (app/admission/tenants.py)."""

from __future__ import annotations

from app.admission.tenants import digest_of


def tenant(name: str, secret: str, limits: str = "") -> str:
    """A tenant with limits, and its only key, which has the tenant's name."""
    return (
        f"[tenants.{name}]\n{limits}\n"
        f'[[keys]]\nid = "{name}"\ntenant = "{name}"\nsha256 = "{digest_of(secret.encode())}"\n'
    )
