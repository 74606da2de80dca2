"""Settings of what happens when the engine dies or hangs."""

from __future__ import annotations

from pydantic import Field

from app.settings.section import Section


class SupervisionSettings(Section):
    """What happens when the engine dies or hangs."""

    hang_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds without a step, while requests run, after which the engine counts as "
        "hung and is killed; more than the longest step takes, compilation included.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Most restarts of the engine within `restart_window_s`; one more and the "
        "process exits with code 3. 0 exits at the first death.",
    )
    restart_window_s: float = Field(
        600.0,
        gt=0,
        description="Seconds of service after which a restart no longer counts "
        "towards `max_restarts`.",
    )
    restart_backoff_s: float = Field(
        0.5, ge=0, description="Seconds before the first restart; each further wait is doubled."
    )
    restart_backoff_max_s: float = Field(60.0, ge=0, description="Most seconds before a restart.")
