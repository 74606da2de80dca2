"""The kind of draft head that is served, from its own configuration."""

from __future__ import annotations

from app.errors import StartupError
from app.settings import Settings
from drafters.model.config import Method, method_of

# What is said of a gateway that drafts without a head.
WITHOUT_HEAD = (
    "no draft head: drafts are looked up in each request's own text; `aerie train` makes a head, "
    "which drafts where a text does not repeat itself too"
)


def head_method(settings: Settings) -> Method:
    """How the head of the settings drafts: all K tokens in one pass, or one by one.

    Reads its config.json, from its hub if it is not on this machine. Imports vllm. Raises
    StartupError if there is none.
    """
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    drafter = settings.speculation.drafter
    if drafter is None or not settings.speculates:
        return "p-eagle"
    try:
        document = get_hf_file_to_dict("config.json", drafter)
    except ValueError as error:
        raise StartupError(f"the head {drafter}: config.json: {error}") from error
    if not isinstance(document, dict):
        raise StartupError(f"the head {drafter} has no config.json that can be read")
    return method_of(document)
