"""Settings of API keys, quotas and the admission queue."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from app.settings.section import Section

TENANT_NAME = r"[A-Za-z0-9._-]{1,64}"  # printed in logs, and a metric's label: short and plain


class AdmissionSettings(Section):
    """API keys, and how much is admitted at once."""

    keys_file: str | None = Field(
        None,
        min_length=1,
        description="TOML file with tenants and hashed API keys; read again when it changes.",
    )
    keys: str | None = Field(None, description="The text of a keys file, instead of `keys_file`.")
    api_key: str | None = Field(
        None,
        pattern=r"^[!-~]{1,256}$",
        description="One key for all requests, instead of `keys`; it has no limits and no admin "
        "rights. As AERIE_API_KEY it shows in no list of processes.",
    )
    keys_poll_s: float = Field(
        2.0, gt=0, description="Seconds between checks of whether the keys file has changed."
    )
    public_paths: str = Field(
        "/livez,/readyz,/ping,/health,/metrics",
        description="Paths that need no key, exactly as written and separated by commas. Requests "
        "without a key have no limits there.",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Most sequences in the engine at once (default: its max_num_seqs and an "
        "eighth more, so that a slot that gets free is filled at once).",
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="Most requests in the admission queue; further ones get a 429 (default: as "
        "many as `max_running`, and an eighth of that in an overload that lasts longer than an "
        "answer takes).",
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
        "send the same long prompts, but response times then reveal what others have sent.",
    )
    redis_url: str | None = Field(
        None, description="Redis in which several gateways share quotas (redis://HOST:PORT/0)."
    )
    redis_timeout_s: float = Field(
        0.25, gt=0, description="Seconds to wait for Redis; then this gateway counts by itself."
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _one_key(cls, value: Any) -> Any:
        """Take one key out of a list, which vLLM's option may hold."""
        if not isinstance(value, list | tuple):
            return value
        if len(value) != 1:
            raise ValueError("takes one key, and MODEL stands before it; for several use keys_file")
        return value[0]

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str | None) -> str | None:
        """Refuse what the client of Redis could not read. Empty text is none."""
        if not value:
            return None
        from redis.asyncio.connection import parse_url

        try:
            parse_url(value)
        except ValueError:  # its message may quote the password
            raise ValueError("must be redis://[USER:PASSWORD@]HOST[:PORT][/DB]") from None
        return value

    @property
    def guarded(self) -> bool:
        """Whether requests need a key."""
        return self.keys_file is not None or self.keys is not None
