"""An engine without processes, whose phase is all that it is."""

from __future__ import annotations

from collections.abc import Callable

from app.engine.supervisor import Engine, Phase


class PhasedEngine(Engine):
    """Ready while its phase says so: from its start until its stop, or as a test sets it."""

    async def run(self, on_ready: Callable[[], None]) -> None:
        self.phase = Phase.READY

    async def stop(self) -> None:
        self.phase = Phase.STOPPING

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY
