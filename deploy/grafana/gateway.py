"""Dashboard *Gateway*: traffic, latency, errors, queues and tenants."""

from __future__ import annotations

from typing import Any

from deploy.grafana.panel import OURS, VLLM, Query, board, lines, number, quantiles, rate

RESPONSES = "aerie_responses_total"
NOW = "5m"
FEW = ((None, "green"), (0.005, "yellow"), (0.02, "red"))
FULL = ((None, "green"), (0.8, "yellow"), (0.95, "red"))


def dashboard() -> Any:
    """The dashboard's builder."""
    return board(
        "aerie-gateway",
        "Gateway",
        "Traffic, latency, errors, queues, cache and tenants of the gateways.",
        (_now, _traffic, _latency, _queue, _tenants),
    )


def _failed(window: str) -> str:
    """Share of 5xx among these and 2xx; 0 while there are only 2xx. Many refusals would hide that
    all other requests fail."""
    failed = rate(RESPONSES, labels=f'{OURS}, status=~"5.."', window=window)
    answered = rate(RESPONSES, labels=f'{OURS}, status=~"2..|5.."', window=window)
    return f"({failed} or 0 * {answered}) / ({answered} > 0)"


def _now() -> tuple[str, list[Any]]:
    ttft = f"sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{{{VLLM}}}[{NOW}]))"
    return "Now", [
        number(
            "Engines serving",
            "Gateways whose engine takes requests.",
            Query(f"sum(aerie_engine_up{{{OURS}}})", "engines"),
            decimals=0,
        ),
        number(
            "Requests",
            "Answers per second on paths that run the model or tokenizer, refusals included.",
            Query(rate(RESPONSES, window=NOW), "requests/s"),
            unit="reqps",
        ),
        number(
            "Failed",
            "Share of answers with a status of 5xx in the last five minutes. Refusals (4xx) are "
            "not counted.",
            Query(_failed(NOW), "share"),
            unit="percentunit",
            steps=FEW,
        ),
        number(
            "First token, 95%",
            "95% of requests had their first token within this time, from admission on.",
            Query(f"histogram_quantile(0.95, {ttft})", "p95"),
            unit="s",
        ),
        number(
            "Waiting",
            "Requests in the admission queue and in the engine's.",
            Query(
                f"sum(aerie_gate_waiting{{{OURS}}}) + sum(vllm:num_requests_waiting{{{VLLM}}})",
                "requests",
            ),
            decimals=0,
        ),
        number(
            "KV cache",
            "Share in use, of the fullest engine.",
            Query(f"max(vllm:kv_cache_usage_perc{{{VLLM}}})", "share"),
            unit="percentunit",
            decimals=0,
            steps=FULL,
        ),
    ]


def _traffic() -> tuple[str, list[Any]]:
    return "Traffic and errors", [
        lines(
            "Answers by path",
            "Per second, whatever their status.",
            [Query(rate(RESPONSES, "path"), "{{path}}")],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Answers by status",
            "Per second. `none`: the client left before there was an answer. A stream counts as "
            "what its headers said.",
            [Query(rate(RESPONSES, "status"), "{{status}}")],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Tokens",
            "Per second: tokens of prompts, of these from the prefix cache, tokens of answers.",
            [
                Query(rate("vllm:prompt_tokens_total", labels=VLLM), "prompts"),
                Query(rate("vllm:prefix_cache_hits_total", labels=VLLM), "of them cached"),
                Query(rate("vllm:generation_tokens_total", labels=VLLM), "answers"),
            ],
        ),
        lines(
            "How answers ended",
            "Sequences per second by the engine's reason: stop, length, abort (the client left, or "
            "a deadline passed), error.",
            [
                Query(
                    rate("vllm:request_success_total", "finished_reason", VLLM),
                    "{{finished_reason}}",
                )
            ],
            unit="ops",
        ),
        lines(
            "Refused",
            "Requests per second that were refused before they reached the engine, by reason.",
            [Query(rate("aerie_requests_refused_total", "reason"), "{{reason}}")],
            unit="reqps",
        ),
        lines(
            "Ended by a deadline, connections closed",
            "Per second, by which deadline or for what reason.",
            [
                Query(rate("aerie_requests_expired_total", "deadline"), "deadline: {{deadline}}"),
                Query(rate("aerie_connections_refused_total", "reason"), "connection: {{reason}}"),
            ],
            unit="ops",
        ),
    ]


def _latency() -> tuple[str, list[Any]]:
    return "Latency", [
        lines(
            "Time to first token",
            "From admission on: the engine's queue and the prompt. The alert's objective is 2.5 s.",
            quantiles("vllm:time_to_first_token_seconds"),
            unit="s",
            width=8,
        ),
        lines(
            "Time per output token",
            "Mean of a request after its first token. Drafting is meant to lower this one.",
            quantiles("vllm:request_time_per_output_token_seconds"),
            unit="s",
            width=8,
        ),
        lines(
            "Whole request",
            "From admission to the last token.",
            quantiles("vllm:e2e_request_latency_seconds"),
            unit="s",
            width=8,
        ),
    ]


def _queue() -> tuple[str, list[Any]]:
    def preempted(metric: str) -> str:
        return rate(metric, labels=VLLM)

    return "Queue and engine", [
        lines(
            "Running and waiting",
            "Requests for admission, sequences in the engine: a request with `n` is `n` sequences.",
            [
                Query(f"sum(vllm:num_requests_running{{{VLLM}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{VLLM}}})", "waiting in the engine"),
                Query(f"sum(aerie_gate_waiting{{{OURS}}})", "waiting for admission"),
                Query(f"sum(aerie_gate_running{{{OURS}}})", "admitted"),
            ],
        ),
        lines(
            "Time in queues",
            "95% of requests waited less: for admission, then in the engine.",
            [
                Query(
                    f"histogram_quantile(0.95, {rate('aerie_gate_wait_seconds_bucket', 'le')})",
                    "admission, p95",
                ),
                Query(
                    "histogram_quantile(0.95, "
                    f"{rate('vllm:request_queue_time_seconds_bucket', 'le', VLLM)})",
                    "engine, p95",
                ),
            ],
            unit="s",
        ),
        lines(
            "KV cache in use",
            "Share of each engine's blocks. Near 1 requests wait, or are preempted and computed "
            "again.",
            [
                Query(
                    f"max by (instance, engine) (vllm:kv_cache_usage_perc{{{VLLM}}})",
                    "{{instance}} engine {{engine}}",
                )
            ],
            unit="percentunit",
            most=1,
            width=8,
        ),
        lines(
            "Preemptions",
            "Running requests whose KV cache was taken away, to be computed again, per second.",
            [Query(preempted("vllm:num_preemptions_total"), "preemptions")],
            unit="ops",
            width=8,
        ),
        lines(
            "Prefix cache hits",
            "Of the prompt tokens looked up, the share that was there.",
            [
                Query(
                    f"{rate('vllm:prefix_cache_hits_total', labels=VLLM)} / "
                    f"({rate('vllm:prefix_cache_queries_total', labels=VLLM)} > 0)",
                    "share",
                )
            ],
            unit="percentunit",
            most=1,
            width=8,
        ),
        lines(
            "Start-up",
            "Seconds from the process's start to ready; 0 until then.",
            [Query(f"max by (instance) (aerie_start_seconds{{{OURS}}})", "{{instance}}")],
            unit="s",
            width=8,
        ),
        lines(
            "Engine up",
            "1 while the engine of a gateway takes requests, 0 while it starts or is gone.",
            [Query(f"min by (instance) (aerie_engine_up{{{OURS}}})", "{{instance}}")],
            most=1,
            width=8,
        ),
        lines(
            "Engine restarts",
            "Restarts within the last 15 minutes, by what ended the engine before.",
            [
                Query(
                    "sum by (instance, reason) "
                    f"(increase(aerie_engine_restarts_total{{{OURS}}}[15m]))",
                    "{{instance}} {{reason}}",
                )
            ],
            width=8,
        ),
    ]


def _tenants() -> tuple[str, list[Any]]:
    return "Tenants", [
        lines(
            "Tokens by tenant",
            "Per second, prompt and output together. Without keys everybody is one tenant.",
            [
                Query(
                    rate("aerie_tenant_tokens_total", "tenant", f'{OURS}, kind=~"prompt|output"'),
                    "{{tenant}}",
                )
            ],
            stacked=True,
        ),
        lines(
            "Keys and quotas",
            "Times the keys file was read again, and rate limits decided without the shared Redis.",
            [
                Query(rate("aerie_key_reloads_total", "result"), "keys read: {{result}}"),
                Query(rate("aerie_limiter_fallbacks_total"), "without Redis"),
            ],
            unit="ops",
        ),
    ]
