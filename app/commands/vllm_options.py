"""vLLM's options -> settings, for users of `vllm serve` or of AWS's vLLM container.

Options that have a setting here become that setting, other engine options go to `engine_args`, and
what cannot work here is refused by name, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import SettingsError

# vLLM's option -> setting that takes the same value, under the same name or another.
_SETTINGS = {
    **{
        name: name
        for name in (
            "model", "revision", "dtype", "quantization", "trust_remote_code",
            "chat_template",
            "tool_call_parser", "tool_strict_level", "reasoning_parser", "max_model_len",
            "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
            "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "seed",
            "host", "port", "otlp_traces_endpoint",
        )
    },
    "model_tag": "model",
    "sse_keep_alive_interval": "sse_keep_alive_s",
}  # fmt: skip
_LEVELS = {"critical": "error", "trace": "debug"}
_SHORT_SPECULATION = {  # vLLM's short forms of parts of speculative_config
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
# Options that ask for what this gateway always does.
_ALWAYS_SO = frozenset(
    {
        *("enable_request_id_headers", "disable_uvicorn_access_log"),
        *("enable_prompt_tokens_details", "enable_offline_docs"),
    }
)
_TLS = "the gateway speaks plain HTTP: terminate TLS in front of it"
_PROCESSES = "one gateway serves one engine: start several behind a router (docs/scale.md)"
_OWN_CLASS = "the gateway uses a class of its own for it"
_NO_LOG = "no text of requests is logged"
_HEADS = "--max-header-kib and --max-headers bound what a request's head may hold"
_WAITING = "--max-waiting bounds how many requests wait"
_CORS = "--allowed-origins allows web pages all that they need"
_CANNOT_WORK: dict[str, str] = {
    **dict.fromkeys(
        (
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
            "enable_ssl_refresh",
        ),
        _TLS,
    ),
    **dict.fromkeys(("api_server_count", "headless", "data_parallel_supervisor_port"), _PROCESSES),
    **dict.fromkeys(("scheduler_cls", "worker_cls", "worker_extension_cls"), _OWN_CLASS),
    "additional_config": "the gateway puts the drafter's configuration there",
    **dict.fromkeys(("max_log_len", "enable_log_outputs", "enable_log_deltas"), _NO_LOG),
    **dict.fromkeys(("h11_max_incomplete_event_size", "h11_max_header_count"), _HEADS),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), _WAITING),
    **dict.fromkeys(("allow_credentials", "allowed_methods", "allowed_headers"), _CORS),
    "lora_modules": "adapters are not served",
    "tool_server": "the gateway runs no tools (--unknown-tools)",
    "trust_request_chat_template": "templates are not taken from requests",
    "disable_log_stats": "metrics and the choice of K need them",
    "grpc": "the gateway speaks HTTP only",
    "uds": "the gateway listens on an address and a port only",
}

Names = Callable[[], frozenset[str]]  # app.engine.configuration.vllm_cli.engine_argument_names


def settings(given: Mapping[str, Any], names: Names, spell: Callable[[str], str]) -> dict[str, Any]:
    """Setting -> value for vLLM's options (names with underscores) and their typed values.

    `spell` writes an option's name as the user did. Raises SettingsError with that name.
    """
    found: dict[str, Any] = {}
    engine_args: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for option, value in given.items():
        try:
            if (setting := _SETTINGS.get(option)) is not None:
                found[setting] = value
            elif option in _SHORT_SPECULATION:
                speculation[_SHORT_SPECULATION[option]] = value
            elif option in _SPECIAL:
                found |= _SPECIAL[option](value)
            elif option == "enable_auto_tool_choice":
                if value and "tool_call_parser" not in given:
                    raise SettingsError(option, f"needs {spell('tool_call_parser')}")
            elif option in _CANNOT_WORK:
                raise SettingsError(option, f"cannot work here: {_CANNOT_WORK[option]}")
            elif option in names():
                engine_args[option] = value
            elif option not in _ALWAYS_SO:
                raise SettingsError(option, "is not an option of this gateway; take it out")
        except SettingsError as error:
            raise SettingsError(spell(option), str(error).partition(": ")[2]) from None
    if speculation:
        try:
            found |= _speculation(speculation)
        except SettingsError as error:
            raise SettingsError(spell("spec_method"), str(error).partition(": ")[2]) from None
    if found.get("max_model_len", 0) == -1:  # vLLM's `auto`
        engine_args["max_model_len"] = found.pop("max_model_len")
    if engine_args:
        found["engine_args"] = engine_args
    return found


def _speculation(value: Any) -> dict[str, Any]:
    """vLLM's speculative configuration -> head and K.

    `parallel_drafting` has no effect: the head's own configuration says how it drafts.
    """
    option = "speculative_config"
    config = json.loads(value) if isinstance(value, str) else dict(value)
    method = config.pop("method", "eagle3")
    config.pop("parallel_drafting", None)
    head, k = config.pop("model", None), config.pop("num_speculative_tokens", None)
    if method not in ("eagle3", "peagle"):
        raise SettingsError(
            option,
            f'{{"method": "{method}"}}: this gateway drafts with P-EAGLE and EAGLE-3 heads (method '
            "eagle3 or peagle)",
        )
    if not head:
        raise SettingsError(option, "names no model, which is the draft head here")
    if config:
        names = ", ".join(sorted(config))
        raise SettingsError(option, f"has {names}: K is chosen at every step here")
    return {"drafter": head} if k is None else {"drafter": head, "k": k}


def _served_name(value: Any) -> dict[str, Any]:
    names = [value] if isinstance(value, str) else list(value)
    if len(names) != 1:
        raise SettingsError("served_model_name", f"has {len(names)} names, this gateway serves one")
    return {"served_model_name": names[0]}


def _api_key(value: Any) -> dict[str, Any]:
    keys = [value] if isinstance(value, str) else list(value)
    if len(keys) != 1:
        raise SettingsError("api_key", "takes one key; for several use --keys-file (`aerie keys`)")
    return {"api_key": keys[0]}


_SPECIAL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "speculative_config": _speculation,
    "served_model_name": _served_name,
    "api_key": _api_key,
    "uvicorn_log_level": lambda value: {"log_level": _LEVELS.get(value, value)},
    "allowed_media_domains": lambda value: {"media_domains": ",".join(value)},
    "allowed_origins": lambda value: {"allowed_origins": ",".join(value)},
}
