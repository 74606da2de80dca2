"""Settings of learning: what is captured of the traffic, how long it is kept, who trains on it."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from app.settings.admission import TENANT_NAME
from app.settings.section import Section, items_in

# `(anonymous)` is whoever shows no key on a public path.
_TENANT = re.compile(rf"{TENANT_NAME}|\(anonymous\)")


class LearningSettings(Section):
    """Training the draft head further on what the gateway serves."""

    learn: str | None = Field(
        None,
        min_length=1,
        description="Folder in which the token ids of prompts and answers are captured, and the "
        "head is trained further on them; nothing is captured by default. It becomes its owner's "
        "alone (mode 0700).",
    )
    learn_mib: float = Field(
        256.0,
        ge=16,
        description="Most MiB of captured sequences in the folder; beyond it the oldest are "
        "deleted.",
    )
    learn_days: float = Field(
        30.0, gt=0, description="Days after which captured sequences are deleted."
    )
    learn_train: bool = Field(
        True,
        description="Train beside the gateway, in a process of lowest priority, while no request "
        "runs. Off where `aerie learn` trains in the same folder from elsewhere.",
    )
    learn_share: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Share of the time for which it trains under load too: for a gateway that is "
        "never idle. It takes from the engine what the two share, cores or a GPU.",
    )
    learn_max_length: int = Field(
        4096,
        ge=16,
        description="Most tokens of prompt and answer that it trains on: longer answers are cut, "
        "sequences with longer prompts are left out. Its memory grows with the square of it.",
    )
    learn_device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="Device that it trains on: `cpu`, `cuda`, or one GPU such as `cuda:1`. On the "
        "engine's GPU it needs memory that `gpu_memory_utilization` leaves.",
    )
    learn_exclude: str = Field(
        "",
        description="Names of tenants, separated by commas, of whose sequences nothing is "
        "captured, and what was captured before is deleted; `learn = false` says it in the keys "
        "file.",
    )

    @property
    def excluded(self) -> frozenset[str]:
        """The names in `learn_exclude`."""
        return frozenset(items_in(self.learn_exclude))

    @field_validator("learn_exclude")
    @classmethod
    def _check_names(cls, value: str) -> str:
        """Refuse what no tenant is called: its sequences would be captured without a word."""
        for name in items_in(value):
            if not _TENANT.fullmatch(name):
                raise ValueError(f"{name} is no tenant's name")
        return value
