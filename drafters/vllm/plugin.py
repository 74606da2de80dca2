"""Entry point of the `vllm.general_plugins` group: vLLM calls it in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Prepare this process and patch vLLM before it builds an engine. Safe to call again."""
    from drafters.log_records import escape_log_records
    from drafters.parent_death import end_with_multiprocessing_parent
    from drafters.streams import unfailing
    from drafters.vllm import error_report, patches

    end_with_multiprocessing_parent()
    unfailing()
    escape_log_records()
    error_report.install()
    patches.apply()
