"""What there is to set, with its default, its bounds and its description."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from drafters.config import TPOT_BOUNDS_S, DrafterConfig
from drafters.control.objective import FIXED, Name, Objective

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")


def _names(text: str) -> tuple[str, ...]:
    """The names in a list that is separated by commas, in lower case."""
    names = (name.strip().lower() for name in text.split(","))
    return tuple(name for name in names if name)


class Section(BaseModel):
    """Frozen and strict: a typo is an error, not a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerSettings(Section):
    """Settings of the HTTP server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    max_body_mib: float | None = Field(
        None,
        gt=0,
        description="Largest request body in MiB; larger ones get a 413 (default: 1 MiB and 32 "
        "bytes for each token of the context, at least 16 MiB if the model takes media).",
    )
    max_bodies_mib: float = Field(
        512.0, gt=0, description="Most MiB of bodies of all requests together; beyond it a 429."
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Seconds within which a request's body must have arrived."
    )
    max_header_kib: float = Field(
        32.0, gt=0, description="Largest request line plus headers in KiB; larger ones get a 431."
    )
    max_headers: int = Field(100, ge=1, description="Most headers of a request.")
    header_timeout_s: float = Field(
        10.0, gt=0, description="Seconds within which a request's headers must have arrived."
    )
    write_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a client may leave a full connection unread."
    )
    idle_timeout_s: float = Field(
        75.0, gt=0, description="Seconds that a connection is kept open between requests."
    )
    max_connections: int = Field(
        1024, ge=1, description="Most open connections; further ones get a 503 and are closed."
    )
    page: bool = Field(
        True,
        description="Serve a page for people at `/`: chat, race, and live figures of drafting.",
    )
    allowed_origins: str = Field(
        "",
        description="Origins of web pages that may call the gateway from a browser (CORS), "
        "separated by commas, each as SCHEME://HOST[:PORT], or `*` for all; none by default.",
    )
    sse_keep_alive_s: float = Field(
        15.0, gt=0, description="Seconds of silence after which a stream sends an SSE comment."
    )
    stored_responses_mib: float = Field(
        16.0,
        ge=0,
        description="MiB of /v1/responses that each tenant may have in memory for "
        "`previous_response_id`; new ones replace the oldest. 0 keeps none.",
    )
    stored_responses_s: float = Field(
        3600.0, gt=0, description="Seconds that a response is kept in memory at most."
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )
    access_log: bool = Field(
        False,
        description="Log one line per request for work: its id, status, tokens and times, and no "
        "text of its own.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector that gateway and engine send a span of each request "
        "for work to (http://HOST:4317, or over HTTP http://HOST:4318/v1/traces); none by default.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of the gateway's own log lines; vLLM's are text."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins` one by one, as browsers write them: in lower case."""
        return _names(self.allowed_origins)

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        """Refuse what no browser sends as an origin: it would match no page, in silence."""
        for name in _names(value):
            if name != "*" and not _ORIGIN.fullmatch(name):
                raise ValueError(f"{name} is not an origin: SCHEME://HOST[:PORT] without a path")
        return value


class AdmissionSettings(Section):
    """Who is let in, and how much of it at once."""

    keys_file: str | None = Field(
        None, description="TOML file with tenants and hashed API keys; read again when it changes."
    )
    keys: str | None = Field(
        None, description="The same as text, for an environment variable (instead of a file)."
    )
    api_key: str | None = Field(
        None,
        pattern=r"^[!-~]{1,256}$",
        description="One key that every request must show, without limits and no admin's, instead "
        "of `keys`; set as AERIE_API_KEY it is in no list of processes.",
    )
    keys_poll_s: float = Field(
        2.0, gt=0, description="Seconds between looks at whether the keys file has changed."
    )
    public_paths: str = Field(
        "/livez,/readyz,/ping,/health,/metrics",
        description="Paths that need no key, exactly as written and separated by commas.",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Most sequences in the engine at once (default: its max_num_seqs and an "
        "eighth more, so that a place that gets free is filled at once).",
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="Most requests that wait for a place; further ones get a 429 (default: as "
        "many as the engine has places, and an eighth of that in an overload that lasts longer "
        "than an answer takes).",
    )
    max_kv_usage: float = Field(
        0.95, gt=0, le=1, description="Share of the KV cache in use above which requests wait."
    )
    queue_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a request may wait to be started; then it gets a 503."
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds after which any request ends with a 504; the header "
        "`x-request-timeout` can ask for fewer.",
    )
    assumed_output_tokens: int = Field(
        256,
        ge=1,
        description="Output tokens that are charged up front where only the model's context ends a "
        "request's output; what was used is settled at its end.",
    )
    share_prefix_cache: bool = Field(
        False,
        description="Let tenants use each other's entries of the prefix cache: faster where they "
        "send the same long prompts, but times then tell each of them what others have sent.",
    )
    redis_url: str | None = Field(
        None, description="Redis that several gateways share their quotas in (redis://HOST:PORT/0)."
    )
    redis_timeout_s: float = Field(
        0.25, gt=0, description="Seconds to wait for Redis; then this gateway counts by itself."
    )

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return self.keys_file is not None or self.keys is not None


class LimitSettings(Section):
    """Bounds on what one request may ask for; each refusal names the field and the bound."""

    max_body_values: int | None = Field(
        None,
        ge=1,
        description="Most values in a body's JSON: numbers, texts, lists, objects (default: 65536 "
        "and one for each token of the context; 65536 of them may be lists or objects).",
    )
    max_body_depth: int = Field(
        128, ge=1, description="Deepest nesting of lists and objects in a body's JSON."
    )
    max_choices: int = Field(128, ge=1, description="Most choices of a request: `n` times prompts.")
    max_prompts: int = Field(128, ge=1, description="Most prompts of one completions request.")
    max_messages: int = Field(2048, ge=1, description="Most messages of a chat.")
    max_input_items: int = Field(
        1024,
        ge=1,
        description="Most input items of a Responses request: vLLM takes 0.1 ms to check one.",
    )
    max_content_parts: int = Field(
        4096, ge=1, description="Most content parts and tool calls of all messages together."
    )
    max_logprobs: int = Field(
        20, ge=0, le=20, description="Most alternatives per token (`logprobs`, `top_logprobs`)."
    )
    max_stop_sequences: int = Field(16, ge=1, description="Most stop sequences.")
    max_stop_length: int = Field(1024, ge=1, description="Longest stop sequence, in characters.")
    max_token_list: int = Field(
        1024,
        ge=1,
        description="Most entries of `logit_bias`, `stop_token_ids`, `bad_words` and "
        "`allowed_token_ids`.",
    )
    max_tools: int = Field(128, ge=1, description="Most tools of a request.")
    max_schema_kib: float = Field(
        64.0, gt=0, description="Largest JSON schema, grammar or tool, in KiB of text."
    )
    max_schema_depth: int = Field(
        64, ge=1, description="Deepest nesting of JSON inside a schema or tool."
    )
    max_schema_properties: int = Field(
        500,
        ge=1,
        description="Most entries of one object in a schema: compiling takes time that grows "
        "with their square.",
    )
    max_pattern_length: int = Field(2048, ge=1, description="Longest regular expression.")
    media_domains: str = Field(
        "",
        description="Hosts, separated by commas, that a multimodal model's requests may name in "
        "URLs; none by default. Media inside of a request (data URLs) need no host.",
    )

    @property
    def media_hosts(self) -> frozenset[str]:
        """`media_domains` as a set."""
        return frozenset(_names(self.media_domains))


class ModelSettings(Section):
    """The target model and how it talks."""

    model: str = Field("", description="Target model: a folder or a hub id.")
    served_model_name: str = Field(
        "", description="Model id in the API; the last part of `model` when empty."
    )
    revision: str | None = Field(None, description="Hub revision of the target.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Data type of weights and activations."
    )
    quantization: str | None = Field(None, description="vLLM quantisation method.")
    trust_remote_code: bool = Field(False, description="Run Python code found in the model folder.")
    chat_template: str | None = Field(
        None, description="Chat template file that replaces the model's own."
    )
    tool_call_parser: str | None = Field(
        None,
        description="vLLM tool parser; without one, tools that the model may call are refused.",
    )
    unknown_tools: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What to do with a request's tools that only an API's provider can run, as "
        "`web_search`: a 400 that names the tool, or an answer as if it were not there.",
    )
    tool_strict_level: Literal["auto", "function", "parameter"] = Field(
        "parameter",
        description="How far tool calls are held to their JSON schema: `parameter` always, "
        "`function` only the call's envelope, `auto` only where a tool says strict.",
    )
    reasoning_parser: str | None = Field(None, description="vLLM reasoning parser.")

    @field_validator("dtype", mode="before")
    @classmethod
    def _full_name(cls, value: Any) -> Any:
        """vLLM's other names of data types."""
        return {"half": "float16", "float": "float32"}.get(value, value)


class SpeculationSettings(Section):
    """Settings of drafting and K."""

    drafter: str | None = Field(None, description="P-EAGLE or EAGLE-3 head: a folder or a hub id.")
    k: int = Field(
        5, ge=0, le=32, description="Most draft tokens per step (K); 0 serves without a drafter."
    )
    objective: Name = Field(
        "throughput",
        description="What K is chosen for at every step: most tokens per second, most tokens per "
        "second while `tpot_s` holds, always `k`, or no drafts at all.",
    )
    tpot_s: float | None = Field(
        None,
        ge=TPOT_BOUNDS_S[0],
        le=TPOT_BOUNDS_S[1],
        description="Seconds per output token that `--objective latency` holds.",
    )
    calibration_s: float = Field(
        10.0,
        ge=0,
        le=60,
        description="Seconds that start-up may spend on measuring what steps cost; 0 learns from "
        "the first requests instead.",
    )
    calibration_file: str | None = Field(
        None, description="File that the measured costs are kept in for the next start."
    )
    speculation_header: bool = Field(
        True,
        description="Say in every answer how many tokens were drafted and accepted: in the header "
        "`x-aerie-speculation` and, as vLLM does, in `metrics.speculative_decoding`; and for whom "
        "it asks, which tokens (`speculation.tokens`).",
    )
    catch_up_tokens: int = Field(
        DrafterConfig.catch_up_tokens,
        ge=1,
        description="How many tokens a request can go without drafting before the drafter "
        "forgets what came earlier. Each one costs a hidden state of memory for every request "
        "of a full batch.",
    )
    draft_context: int = Field(
        DrafterConfig.context_tokens,
        ge=0,
        description="How many tokens the drafter looks back at most; 0 for all. A head drafts "
        "worse in contexts that are longer than those it was trained on.",
    )

    def aim(self) -> Objective:
        """What K is chosen for. Raises ObjectiveError."""
        return Objective(self.objective, self.k if self.objective == FIXED else None, self.tpot_s)


class EngineSettings(Section):
    """Sizes of the vLLM engine. None leaves the choice to vLLM."""

    max_model_len: int | None = Field(
        None, ge=16, description="Longest prompt plus output, in tokens."
    )
    max_num_seqs: int | None = Field(None, ge=1, description="Most requests in one batch.")
    max_num_batched_tokens: int | None = Field(None, ge=16, description="Most tokens in one step.")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="KV cache in GiB (default: on a GPU vLLM's share of its memory, on a CPU a "
        "quarter of what is free).",
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of GPU memory that vLLM may use."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that one copy is split over.")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of equal prefixes.")
    enforce_eager: bool = Field(False, description="Skip compilation: starts faster, runs slower.")
    seed: int = Field(0, description="Seed of the engine.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further vLLM engine arguments, as a JSON object; vLLM's names.",
    )

    @property
    def has_weights(self) -> bool:
        """False where vLLM makes the weights up: then there is nothing in them to check."""
        return self.engine_args.get("load_format") != "dummy"

    @field_validator("max_model_len", "max_num_batched_tokens", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        """Numbers as vLLM takes them too: 32k is 32,000 and 32K is 32,768."""
        match = _COUNT.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        base = 1000 if match[2].islower() else 1024
        return int(float(match[1]) * base ** ("kmg".index(match[2].lower()) + 1))

    @field_validator("engine_args", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Text, as it comes from the command line and the environment, is JSON."""
        return json.loads(value) if isinstance(value, str) else value


class SupervisionSettings(Section):
    """What happens when the engine dies or hangs."""

    hang_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Seconds without a step, while requests run, after which the engine counts as "
        "hung and is killed; more than the longest step takes, compilation included.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Most restarts of the engine within `restart_window_s`; one more and the "
        "process exits with code 3. 0 exits at the first death.",
    )
    restart_window_s: float = Field(
        600.0, gt=0, description="Seconds that a restart counts towards `max_restarts`."
    )
    restart_backoff_s: float = Field(
        0.5, ge=0, description="Seconds before the first restart; each further one waits twice."
    )
    restart_backoff_max_s: float = Field(60.0, ge=0, description="Most seconds before a restart.")


class Settings(Section):
    """The whole tree, as `create_app` and the engine read it."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    speculation: SpeculationSettings = Field(default_factory=SpeculationSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    supervision: SupervisionSettings = Field(default_factory=SupervisionSettings)

    @property
    def served_model_name(self) -> str:
        """Model id in the API."""
        return self.model.served_model_name or Path(self.model.model).name

    @property
    def speculates(self) -> bool:
        """Whether a drafter is asked for."""
        return self.speculation.k > 0


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
