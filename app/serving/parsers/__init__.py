"""Corrections of the parsers by which vLLM finds reasoning and tool calls in answers."""
