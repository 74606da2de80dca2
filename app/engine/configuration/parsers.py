"""Whether vLLM has the parsers that the settings name."""

from __future__ import annotations

from app.errors import SettingsError
from app.settings import Settings


def check_parsers(settings: Settings) -> None:
    """Raise SettingsError for a parser of tool calls or of reasoning that vLLM does not have.

    Those of plugins are known once these are loaded, as AsyncEngineArgs does. Imports vllm.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    model = settings.model
    for key, name, names in (
        ("tool_call_parser", model.tool_call_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", model.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in names:
            raise SettingsError(key, f"vLLM has no {name}; it has {', '.join(names)}")
