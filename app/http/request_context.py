"""State of one request, from authentication to the end of its response."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from app.admission.controller import AdmissionController
from app.admission.estimate import Estimate
from app.admission.limiter import BucketStatus, Limiter, QuotaRequest, RateLimitDecision
from app.admission.queue import QueueFull, Slot
from app.admission.tenants import Identity
from app.errors import NO_RETRY, ApiError, shorten
from app.http.deadline import Deadline
from app.observability import metrics
from app.request_usage import RequestUsage, set_current_usage

_KEY = "aerie.request_context"


class RequestContext:
    """What a request holds: quota, memory for its body, a slot in the engine, its deadlines.

    AuthMiddleware creates it and closes it however the request ends. Everything acquired is
    released exactly once.
    """

    def __init__(self, admission: AdmissionController, identity: Identity) -> None:
        self.identity = identity
        tenant = identity.tenant
        self.usage = RequestUsage(
            tenant.priority,
            tenant.max_k,
            cache_tenant=admission.cache_tenant(tenant),
            captured_as=admission.captured_as(tenant),
        )
        self.deadline: Deadline | None = None
        self.queue_wait_s = 0.0
        self._admission = admission
        self._lease = ""
        self._leased_by = self._charged_by = admission.limiter
        self._body_bytes = 0
        self._slot: Slot | None = None
        self._decision = RateLimitDecision()
        # Fields of the access log; complete once the context is settled.
        self.log_fields: dict[str, Any] = {"tenant": tenant.name}
        if identity.key:
            self.log_fields["key"] = identity.key  # its id, which is no secret

    async def begin(self, total_s: float) -> None:
        """Acquire a lease and a request of the tenant's quota, and start the deadlines.

        Called before the body is read. Further calls do nothing. Raises ApiError 429.
        """
        if self._lease:
            return
        try:
            self._admission.queue.check(self.identity.tenant)
        except QueueFull as full:
            raise _overloaded(full) from None
        self._lease = uuid.uuid4().hex  # `close` releases also what a cancellation interrupts
        quota = QuotaRequest(requests=1, concurrent=True, lease=self._lease)
        try:
            self._leased_by = self._charged_by = await self._acquire_quota(quota)
        except ApiError:
            self._lease = ""  # a refused request holds none
            raise
        set_current_usage(self.usage)
        self.deadline = Deadline(total_s)
        self._admission.open_requests.add(self)

    async def admit(self, model: Any, cost: Estimate) -> None:
        """Check the model, acquire the estimated tokens, and wait for a slot in the engine.

        Called before the engine or the tokenizer runs. `model` is what the body names or, without
        that, the served one. Raises ApiError 403 or 429.
        """
        tenant, settings = self.identity.tenant, self._admission.settings
        if tenant.models is not None and isinstance(model, str) and model not in tenant.models:
            metrics.REFUSED.labels("model").inc()
            message = f"This API key may not use the model `{shorten(model)}`."
            raise ApiError(403, message, param="model", code="model_not_allowed")
        quota = QuotaRequest(tokens=cost.tokens, lease=self._lease)
        self._charged_by = await self._acquire_quota(quota)
        self.usage.charged = cost.tokens
        started = time.monotonic()
        if self.deadline is not None:
            self.deadline.start_within(
                settings.queue_timeout_s, self._is_waiting, lambda: self.usage.begun
            )
        try:
            self._slot = await self._admission.queue.acquire(tenant, cost.sequences)
        except QueueFull as full:
            raise _overloaded(full) from None
        self.queue_wait_s = time.monotonic() - started
        metrics.ADMISSION_SECONDS.observe(self.queue_wait_s)

    def reserve_body_bytes(self, size: int) -> None:
        """Count `size` bytes of the body, which stay in memory until the request ends.

        Raises ApiError 429 when the bodies of all requests together are too large, or those of its
        tenant.
        """
        self._count_body_bytes(size)
        if not self._admission.has_room_for_bodies(self.identity.tenant):
            raise _overloaded(QueueFull(self._admission.queue.retry_after_s))

    @property
    def slot(self) -> Slot | None:
        """Its slot in the engine, while it has one."""
        return self._slot

    @property
    def in_engine(self) -> tuple[int, int]:
        """How many sequences the engine has of it: those with a token, and those without."""
        return self.usage.in_engine

    def end(self, error: ApiError) -> None:
        """Answer with an error, now: the gateway stops."""
        if self.deadline is not None:
            self.deadline.expire("drain", error)

    def release_slot(self) -> None:
        """Release the slot: the engine has no more work with this request."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._admission.queue.release(slot)

    def stop_deadlines(self) -> None:
        """Let nothing end the request any more but its client: its answer is complete."""
        self._admission.open_requests.discard(self)
        if self.deadline is not None:
            self.deadline.stop()

    async def close(self) -> None:
        """Release everything, and settle what is not settled yet."""
        if self.deadline is not None:
            self.deadline.close()
        self._count_body_bytes(-self._body_bytes)
        await self.settle()
        self.usage.sequences.clear()

    async def settle(self) -> None:
        """Release the slot and the lease, and settle the charged tokens with what was used: the
        engine has no more work with this request. Further calls do nothing."""
        self.release_slot()
        self.stop_deadlines()
        if not self._lease:
            return
        tenant, lease, self._lease = self.identity.tenant, self._lease, ""
        used = {"prompt": self.usage.prompt_tokens, "output": self.usage.output_tokens}
        if self.deadline is not None and self.deadline.kind == "queue":
            used = {"prompt": 0, "output": 0}  # this server did not start the request
        elif self.usage.tokenized is not None:
            used["tokenized"] = self.usage.tokenized
        self.log_fields |= self._usage_fields(used)
        for kind, tokens in used.items():
            metrics.TENANT_TOKENS.labels(tenant.name, kind).inc(tokens)
        try:
            if self._leased_by is not self._charged_by:
                await self._leased_by.release(tenant, lease)
        finally:
            await self._charged_by.release(tenant, lease, used=sum(used.values()))

    def rate_limit_headers(self) -> dict[str, str]:
        """OpenAI's rate limit headers, for the limits that the tenant has."""
        headers: dict[str, str] = {}
        for name, bucket in (
            ("requests", self._decision.requests),
            ("tokens", self._decision.tokens),
        ):
            if isinstance(bucket, BucketStatus):
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining)
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.reset_s)
        return headers

    def server_timing(self) -> str:
        """The `server-timing` header: milliseconds queued, in prefill and in decode so far."""
        timing = self.usage.timing
        parts = {"queue": self.queue_wait_s + (timing.queued_s if timing else 0.0)}
        if timing is not None:
            parts["prefill"] = timing.prefill_s
            if timing.decode_s > 0:
                parts["decode"] = timing.decode_s
        return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts.items())

    def speculation_headers(self) -> dict[str, str]:
        """The `x-aerie-speculation` header of a complete response: drafted and accepted tokens."""
        drafts = self.usage.drafts
        if drafts is None:
            return {}
        value = f"drafted={drafts.drafted}, accepted={drafts.accepted}"
        if drafts.steps:
            value += f", k={drafts.k:.2f}, length={drafts.length:.2f}"
        return {"x-aerie-speculation": value}

    def _count_body_bytes(self, size: int) -> None:
        self._body_bytes += size
        self._admission.body_bytes += size
        self._admission.body_bytes_by_tenant[self.identity.tenant.name] += size

    async def _acquire_quota(self, quota: QuotaRequest) -> Limiter:
        """Acquire quota; returns the limiter that takes its release. Raises ApiError 429."""
        decision = self._decision = await self._admission.limiter.acquire(
            self.identity.tenant, quota
        )
        if decision.limited is not None:
            metrics.REFUSED.labels(decision.limited).inc()
            raise _limited(decision, self.identity.tenant.name, quota)
        return decision.limiter or self._admission.limiter

    def _is_waiting(self) -> bool:
        """Whether the request still waits for a slot or, as far as is known, in the engine."""
        return self._slot is None or self._admission.may_wait(self._slot)

    def _usage_fields(self, used: Mapping[str, int]) -> dict[str, Any]:
        """Log fields of tokens, seconds and drafts; times are of the sequence that began first."""
        fields: dict[str, Any] = {f"{kind}_tokens": tokens for kind, tokens in used.items()}
        fields["gate_s"] = round(self.queue_wait_s, 4)
        if (timing := self.usage.timing) is not None:
            fields["queued_s"] = round(timing.queued_s, 4)
            fields["prefill_s"] = round(timing.prefill_s, 4)
            fields["decode_s"] = round(timing.decode_s, 4)
        if (drafts := self.usage.drafts) is not None:
            fields |= {"drafted": drafts.drafted, "accepted": drafts.accepted}
            if drafts.steps:
                fields |= {"k": round(drafts.k, 2), "acceptance_length": round(drafts.length, 2)}
        return fields


def context_of(scope: Scope) -> RequestContext:
    """The context that AuthMiddleware attached to this request."""
    context: RequestContext = scope[_KEY]
    return context


def log_fields_of(scope: Scope) -> dict[str, Any]:
    """Access log fields of a request that has ended; none of one that AuthMiddleware refused."""
    context: RequestContext | None = scope.get(_KEY)
    return {} if context is None else context.log_fields


def attach(scope: Scope, context: RequestContext) -> None:
    """Attach a context to its request, for `context_of`."""
    scope[_KEY] = context


def _overloaded(full: QueueFull) -> ApiError:
    metrics.REFUSED.labels("overload").inc()
    message = "The server is overloaded; try again later."
    headers = {"Retry-After": str(math.ceil(full.retry_after_s))}
    return ApiError(429, message, code="server_overloaded", headers=headers)


def _limited(decision: RateLimitDecision, tenant: str, quota: QuotaRequest) -> ApiError:
    if decision.never:
        limit = decision.tokens.limit if decision.tokens else 0
        message = (
            f"Request too large for {tenant}: about {quota.tokens} tokens with its output, "
            f"limit {limit} tokens per minute."
        )
        headers = {"Retry-After": "60", **NO_RETRY}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
    what = {
        "requests": "requests per minute",
        "tokens": "tokens per minute",
        "concurrent": "requests at once",
    }[decision.limited or "requests"]
    seconds = max(1, math.ceil(decision.retry_after_s))
    message = f"Rate limit reached for {tenant}: {what}. Try again in {seconds} s."
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _duration(seconds: float) -> str:
    """A duration as OpenAI's headers write it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{seconds:.1f}s"
