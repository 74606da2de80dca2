"""The tree of all settings, one section a module."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from app.settings.admission import AdmissionSettings
from app.settings.engine import EngineSettings
from app.settings.learning import LearningSettings
from app.settings.limits import LimitSettings
from app.settings.model import ModelSettings
from app.settings.section import Section
from app.settings.server import ServerSettings
from app.settings.speculation import SpeculationSettings
from app.settings.supervision import SupervisionSettings


class Settings(Section):
    """The whole tree, as `create_app` and the engine read it."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    learning: LearningSettings = Field(default_factory=LearningSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    supervision: SupervisionSettings = Field(default_factory=SupervisionSettings)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The ids of the model in the API: requests may name any of them."""
        return self.model.served_model_name or (Path(self.model.model).name,)

    @property
    def served_model_name(self) -> str:
        """The model's id in answers, metrics and traces: the first of its names."""
        return self.model_names[0]

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted: by a head, or else by lookup in a request's own text."""
        return self.speculation.k > 0

    @property
    def has_head(self) -> bool:
        """Whether a draft head is served."""
        return self.speculation.head_k > 0


def sections() -> dict[str, type[Section]]:
    """Section name -> its class, in the order of the tree."""
    tree: dict[str, type[Section]] = {}
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        tree[name] = field.annotation
    return tree


def section_of() -> dict[str, str]:
    """Setting name -> the section that holds it; names are unique across sections."""
    homes: dict[str, str] = {}
    for section, cls in sections().items():
        for name in cls.model_fields:
            assert name not in homes, f"setting {name} has two homes"
            homes[name] = section
    return homes
