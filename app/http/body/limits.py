"""How large a request body may be and how much JSON it may hold, by the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from app.json_structure import Bounds
from app.settings import Settings

# What a body may hold besides its prompt: tools, schemas, names of fields.
BASE_BYTES = 2**20
# A prompt's token takes 4 bytes of English, 8 as an id and 9 of Chinese with `\u` escapes; the
# rest is for several prompts and for fields that no model reads.
BYTES_PER_TOKEN = 32
# Images and sounds inside of a body.
MEDIA_BYTES = 16 * 2**20
# 65,536 lists are parsed in 4 ms and 65,536 objects of two fields in 21. Only token ids need more.
BASE_VALUES = 65_536


@dataclass(frozen=True)
class BodyLimits:
    """Bytes of a body, as sent and after its content encoding is undone, and its JSON's bounds."""

    size: int
    structure: Bounds


def body_limits(settings: Settings, max_model_len: int | None, takes_media: bool) -> BodyLimits:
    """The limits that the settings name, and for the others what this context length needs."""
    context = max_model_len or 0
    size = BASE_BYTES + BYTES_PER_TOKEN * context
    if takes_media:
        size = max(size, MEDIA_BYTES)
    if settings.server.max_body_mib is not None:
        size = int(settings.server.max_body_mib * 2**20)
    values = settings.limits.max_body_values
    structure = Bounds(
        values=BASE_VALUES + context if values is None else values,
        containers=BASE_VALUES if values is None else values,
        depth=settings.limits.max_body_depth,
    )
    return BodyLimits(size, structure)
