"""The API endpoints that run the model or its tokenizer: one module for each API.

A module declares its endpoints in `ENDPOINTS`. Routes, checks, the OpenAPI document, docs/fields.md
and whatever else treats endpoints differently reads it from these declarations.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from app.declaration.endpoint import Endpoint


def declared() -> tuple[Endpoint, ...]:
    """Every endpoint that a module of this package declares, in the order of the modules' names."""
    names = sorted(module.name for module in iter_modules(__path__))
    return tuple(
        endpoint for name in names for endpoint in import_module(f"{__name__}.{name}").ENDPOINTS
    )
