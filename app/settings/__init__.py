"""Every setting of the gateway, in one frozen tree that holds each default once.

A setting has one name everywhere. `max_model_len` is `--max-model-len` on the
command line, `AERIE_MAX_MODEL_LEN` in the environment and `max_model_len` in
its section of a TOML file. Precedence, highest first: command line, environment, SageMaker's
variables, file, preset, defaults. An unknown or invalid key stops the start, by name.
"""

from __future__ import annotations

from app.settings.admission import AdmissionSettings
from app.settings.engine import EngineSettings
from app.settings.learning import LearningSettings
from app.settings.limits import LimitSettings
from app.settings.model import ModelSettings
from app.settings.section import Section
from app.settings.server import ServerSettings
from app.settings.service_links import drop_service_links
from app.settings.sources import (
    ENV_PREFIX,
    PRESETS,
    REPOSITORY,
    load,
    of_preset,
    preset_names,
    read_preset,
)
from app.settings.speculation import SpeculationSettings
from app.settings.supervision import SupervisionSettings
from app.settings.tree import Settings, section_of, sections

__all__ = [
    "ENV_PREFIX",
    "PRESETS",
    "REPOSITORY",
    "AdmissionSettings",
    "EngineSettings",
    "LearningSettings",
    "LimitSettings",
    "ModelSettings",
    "Section",
    "ServerSettings",
    "Settings",
    "SpeculationSettings",
    "SupervisionSettings",
    "drop_service_links",
    "load",
    "of_preset",
    "preset_names",
    "read_preset",
    "section_of",
    "sections",
]
