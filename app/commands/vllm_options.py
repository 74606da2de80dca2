"""vLLM's options -> settings, for users of `vllm serve` or of AWS's vLLM container.

Options that have a setting here become that setting, other engine options go to `engine_args`.
What cannot work here is refused by name, with the reason, and what changes nothing is taken.
`docs/from-vllm.md` is made from these tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from app.errors import SettingsError

# vLLM's option -> setting that takes the same value, under the same name or another.
SETTINGS = {
    **{
        name: name
        for name in (
            "model", "served_model_name", "revision", "dtype", "quantization", "trust_remote_code",
            "chat_template", "chat_template_content_format", "default_chat_template_kwargs",
            "tool_call_parser", "tool_strict_level", "reasoning_parser", "max_model_len",
            "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
            "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "seed",
            "host", "port", "api_key", "root_path", "allowed_origins", "otlp_traces_endpoint",
        )
    },
    "model_tag": "model",
    "shutdown_timeout": "drain_timeout_s",
    "sse_keep_alive_interval": "sse_keep_alive_s",
    "uvicorn_log_level": "log_level",
    "allowed_media_domains": "media_domains",
}  # fmt: skip
_LEVELS = {"critical": "error", "trace": "debug"}
_SHORT_SPECULATION = {  # vLLM's short forms of parts of speculative_config
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
SPECULATION = ("speculative_config", *_SHORT_SPECULATION)
AUTO_TOOLS = "enable_auto_tool_choice"
# gpt-oss has a parser without it, but what the model is may not be known before it is downloaded.
NEEDS_PARSER = "needs {}, which is openai for gpt-oss"


def _each(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Option -> reason, from pairs of several options, separated by blanks, and their reason."""
    return {option: reason for options, reason in reasons for option in options.split()}


# Options that are taken and change nothing, and why.
NO_EFFECT = _each(
    (
        ("enable_request_id_headers enable_prompt_tokens_details enable_offline_docs "
         "log_error_stack exclude_tools_when_tool_choice_none", "always so"),
        ("disable_uvicorn_access_log disable_access_log_for_endpoints",
         "there is no such log; `--access-log` writes one of requests to the model"),
        ("aggregate_engine_logging", "vLLM's log of figures is not written; /metrics has them"),
        ("enable_flash_late_interaction", "it is for pooling models"),
        ("cohere_is_reasoning_model", "there are no Cohere endpoints"),
    )
)  # fmt: skip
# Options that are refused, and why: each reason names what to do instead, where there is something.
CANNOT_WORK = _each(
    (
        ("ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh",
         "the gateway speaks plain HTTP: terminate TLS in front of it"),
        ("api_server_count headless data_parallel_supervisor_port dp_supervisor_probe_interval_s "
         "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold data_parallel_rank "
         "data_parallel_start_rank data_parallel_external_lb data_parallel_hybrid_lb "
         "data_parallel_multi_port_external_lb",
         "one gateway serves one engine: start several behind a router (docs/scale.md)"),
        ("nnodes node_rank master_addr master_port",
         "other machines cannot run a part of this engine: start a gateway on each, behind a "
         "router (docs/scale.md)"),
        ("scheduler_cls worker_cls worker_extension_cls",
         "the gateway uses a class of its own for it"),
        ("additional_config", "the gateway puts the drafter's configuration there"),
        ("enable_log_requests max_log_len enable_log_outputs enable_log_deltas",
         "no text of requests is logged; --access-log writes all else about them"),
        ("h11_max_incomplete_event_size h11_max_header_count",
         "--max-header-kib and --max-headers bound what a request's head may hold"),
        ("max_num_queued_reqs max_num_queued_tokens",
         "--max-waiting bounds how many requests wait"),
        ("allow_credentials allowed_methods allowed_headers",
         "--allowed-origins allows web pages all that they need"),
        ("lora_modules enable_lora max_loras max_lora_rank max_cpu_loras max_lora_cls_labels "
         "lora_dtype lora_target_modules fully_sharded_loras default_mm_loras "
         "specialize_active_lora enable_tower_connector_lora enable_mixed_moe_lora_format "
         "enable_moe_shared_loras",
         "adapters are not served: merge the adapter into the model"),
        ("tool_server", "the gateway runs no tools (--unknown-tools)"),
        ("tool_parser_plugin reasoning_parser_plugin",
         "parsers come from vLLM or from an installed package with the entry point "
         "`vllm.general_plugins`"),
        ("io_processor_plugin pooler_config convert",
         "pooling models are not served: there are no endpoints of embeddings and scores"),
        ("middleware", "no other code runs within the gateway: put a proxy in front of it"),
        ("trust_request_chat_template", "templates are not taken from requests"),
        ("trust_request_mm_kwargs",
         "how media are loaded is not taken from requests: --mm-processor-kwargs and "
         "--media-io-kwargs set it for all"),
        ("enable_prompt_embeds enable_mm_embeds", "prompts are text, token ids and media"),
        ("allowed_local_media_path",
         "media of this machine's files are never read: send them within the request"),
        ("disable_log_stats", "metrics and the choice of K need them"),
        ("enable_per_request_metrics",
         "answers have the header `server-timing`, and the access log has the same"),
        ("enable_server_load_tracking", "/metrics tells the load"),
        ("enable_force_include_usage",
         "streams end with the usage for requests with `stream_options.include_usage`"),
        ("return_tokens_as_token_ids", "requests ask for it, by a field of this name"),
        ("response_role", "answers have the role `assistant`"),
        ("cohere_format",
         "give --default-chat-template-kwargs '{\"cohere_format\": \"cmd3\"}' instead"),
        ("anthropic_disabled_thinking_effort", "it is always `auto`"),
        ("fingerprint_mode fingerprint_value",
         "answers have the `system_fingerprint` that vLLM gives by default"),
        ("disable_fastapi_docs", "with keys the documents need a key too"),
        ("enable_tokenizer_info_endpoint enable_scale_out tokens_only",
         "there are no such endpoints; /tokenize and /detokenize there are"),
        ("enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
         "weight_transfer_config enable_elastic_ep elastic_ep_max_dp_size profiler_config "
         "enable_fault_tolerance fault_tolerance_config",
         "there are no endpoints that would use it"),
        ("skip_tokenizer_init", "the gateway needs the tokenizer"),
        ("grpc grpc_port", "the gateway speaks HTTP only"),
        ("uds", "the gateway listens on an address and a port only"),
    )
)  # fmt: skip

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
            if option in _SHORT_SPECULATION:
                speculation[_SHORT_SPECULATION[option]] = value
            elif option == "speculative_config":
                found |= _speculation(value)
            elif (setting := SETTINGS.get(option)) is not None:
                found[setting] = _VALUES[option](value) if option in _VALUES else value
            elif option == AUTO_TOOLS:
                if value and "tool_call_parser" not in given:
                    raise SettingsError(option, NEEDS_PARSER.format(spell("tool_call_parser")))
            elif option in CANNOT_WORK:
                if value is not False:  # --no-OPTION asks for what is so anyway
                    raise SettingsError(option, f"cannot work here: {CANNOT_WORK[option]}")
            elif option in names() and option not in NO_EFFECT:
                _check_engine_argument(option, value)
                engine_args[option] = value
            elif option not in NO_EFFECT:
                raise SettingsError(option, "is not an option of this gateway; take it out")
        except SettingsError as error:
            raise SettingsError(spell(option), str(error).partition(": ")[2]) from None
    if speculation:
        try:
            found |= _speculation(speculation)
        except SettingsError as error:
            raise SettingsError(spell("spec_method"), str(error).partition(": ")[2]) from None
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
            "eagle3 or peagle), and by lookup without one (--lookup-k)",
        )
    if not head:
        raise SettingsError(option, "names no model, which is the draft head here")
    if config:
        names = ", ".join(sorted(config))
        raise SettingsError(option, f"has {names}, for which there is no use here: take it out")
    return {"drafter": head} if k is None else {"drafter": head, "k": k}


def _api_key(value: Any) -> str:
    keys = [value] if isinstance(value, str) else list(value)
    if len(keys) != 1:
        raise SettingsError("api_key", "takes one key; for several use --keys-file (`aerie keys`)")
    return str(keys[0])


def _keep_alive(seconds: int) -> int:
    if seconds == 0:
        raise SettingsError("sse_keep_alive_interval", "0 cannot work here: give it in seconds")
    return seconds


def _check_engine_argument(option: str, value: Any) -> None:
    """Refuse what vLLM's engine would do and this gateway could not use."""
    if option == "runner" and value == "pooling":
        raise SettingsError(option, f"pooling cannot work here: {CANNOT_WORK['pooler_config']}")


# How values are written that a setting takes in another form.
_VALUES: dict[str, Callable[[Any], Any]] = {
    "api_key": _api_key,
    "sse_keep_alive_interval": _keep_alive,
    "uvicorn_log_level": lambda value: _LEVELS.get(value, value),
    "allowed_media_domains": ",".join,
    "allowed_origins": ",".join,
}
