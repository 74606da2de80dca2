"""The most tokens that the engine will generate for a request, from its body. No vllm import.

`tests/app/serving/test_engine_requests.py` compares this with what vLLM's serving classes ask of
the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OutputLimit:
    """The bounds of one operation on the output of each sequence.

    `fields` are those that a client may name a limit in; the first that is given is obeyed, and
    the others have no effect. `default` is obeyed where none is given, and `most` (the model's
    context, or less if the operator says so) whatever is asked for.
    """

    fields: tuple[str, ...] = ()
    default: int | None = None
    most: int | None = None

    def of(self, payload: Mapping[str, Any], assumed: int) -> int:
        """Tokens that the engine may generate for each sequence of a body that has passed no check
        yet; `assumed` where only the context ends the output."""
        given = [payload[name] for name in self.fields if payload.get(name) is not None]
        limit = given[0] if given else self.default
        if not isinstance(limit, int) or isinstance(limit, bool):  # none, or refused in a moment
            limit = assumed
        # A prompt that is only scored takes a step, too.
        limit = max(1, limit)
        return limit if self.most is None else min(limit, self.most)
