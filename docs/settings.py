"""Write docs/settings.md from app/settings: python -m docs.settings"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.commands.command_line import bounds_of, choices_of, default_of
from app.settings import Section, sections

PAGE = Path(__file__).with_name("settings.md")
TEXT = """\
# Settings

Made from `app/settings/` by `python -m docs.settings`; a test keeps it so.

A setting `max_model_len` is `--max-model-len` on the command line, `AERIE_MAX_MODEL_LEN` in the
environment, and `max_model_len` in its section of a TOML file that `--config` names. The command
line overrides the environment, which overrides the file, which overrides the preset. An unknown
name or an invalid value stops the start, by name. `aerie serve --help` says the same as this page.

    # aerie.toml
    preset = "gpt-oss-20b"
    [server]
    host = "0.0.0.0"
    [admission]
    keys_file = "/etc/aerie/keys.toml"

Docker Compose passes on the variables that `docker-compose.yml` lists
([containers.md](containers.md#docker-compose)). Options of vLLM's engine that are not here are
handed on to it ([from-vllm.md](from-vllm.md)). The glossary says what a
[target](glossary.md#target) or a [draft head](glossary.md#draft-head) is.

{sections}
"""


def page() -> str:
    """The page as it should be."""
    return TEXT.format(sections="\n\n".join(_section(*item) for item in sections().items()))


def _section(name: str, section: type[Section]) -> str:
    rows = "\n".join(_row(setting, field) for setting, field in section.model_fields.items())
    what = (section.__doc__ or "").splitlines()[0]
    return f"## {name}\n\n{what}\n\n| setting | default | what it is |\n|---|---|---|\n{rows}"


def _row(name: str, field: Any) -> str:
    default, bounds = default_of(field), bounds_of(field)
    value = str(default).lower() if isinstance(default, bool) else default
    shown = "" if default is None else f"`{value}`"
    choices = ", ".join(f"`{choice}`" for choice in choices_of(field.annotation))
    texts = [field.description, choices and f"One of {choices}.", bounds and f"{bounds}."]
    text = " ".join(filter(None, texts)).replace("|", "\\|")
    return f"| `{name}` | {shown} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
