"""The gateway's metrics, each named once. vLLM's own (`vllm:*`) are exported beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from drafters.config import HEAD, SOURCES
from drafters.control.objective import OBJECTIVES
from drafters.control.report import PHASES


def _by(label: str, values: Iterable[str], name: str, text: str) -> Counter:
    """A counter whose label has known values, named in its help. It starts at 0 for each of them:
    a rate needs a sample before the first event."""
    counter = Counter(name, f"{text} {label.capitalize()}: {', '.join(values)}.", [label])
    for value in values:
        counter.labels(value)
    return counter


BUILD_INFO = Gauge(
    "aerie_build_info", "1, with the versions of the gateway and of vLLM.", ["version", "vllm"]
)
MODEL_INFO = Gauge(
    "aerie_model_info",
    "1 from the start of the process, with the model's served name.",
    ["model_name"],
)
START_SECONDS = Gauge("aerie_start_seconds", "Seconds from process start to ready.")
DRAFT_TOKENS_PER_STEP = Gauge(
    "aerie_draft_tokens_per_step",
    "Largest K that the policy may choose; 0 without drafts, and where only lookups of this "
    "project draft, which have no K.",
)
SPECULATION_PATH = Gauge(
    "aerie_speculation_path_info",
    "1, with the path that the engine was started on (`v2` and `v1` are vLLM's model runners, "
    "`v1-eager` is without compilation, `no-drafts` without the head), and the kind of reason why "
    "it is not the first choice: `none` if it is, `unsupported` if that was known beforehand, else "
    "what failed.",
    ["path", "reason"],
)

WARM_UP_ACCEPTANCE = Gauge(
    "aerie_warm_up_acceptance_ratio",
    "Share of the first drafts of all steps that were accepted in the warm-up.",
)
WARM_UP_ACCEPTANCE_LOW = Gauge(
    "aerie_warm_up_acceptance_low",
    "1 if that share is below 20% or half of what the head's model card says, whichever is more, "
    "beyond what chance explains.",
)

ENGINE_UP = Gauge("aerie_engine_up", "1 while the engine serves, 0 while it starts or is gone.")
ENGINE_RESTARTS = _by(
    "reason",
    ("died", "hung"),
    "aerie_engine_restarts_total",
    "Restarts of the engine, by what ended the one before.",
)

# The policy that chooses K (drafters/control). Ratios are for PromQL: the speed-up is
# rate(aerie_decode_seconds_without_drafts_total) / rate(aerie_decode_seconds_total).
K = Gauge(
    "aerie_k",
    "Draft tokens per request that the policy chooses now; 0 while no request may have drafts.",
)
OBJECTIVE = Gauge(
    "aerie_objective", "1 for the objective in force, 0 for the others.", ["objective"]
)
STEPS = Counter("aerie_steps_total", "Engine steps, by the K that they drafted.", ["k"])
STEPS_K = Counter(
    "aerie_steps_k_total", "Sum of the K of all steps; over aerie_steps_total it is their mean."
)
DRAFTED = Counter(
    "aerie_drafts_verified_total",
    "Draft tokens of the head that were verified, by position; none without a head.",
    ["position"],
)
ACCEPTED = Counter(
    "aerie_drafts_accepted_total",
    "Draft tokens of the head that were accepted, by position; none without a head.",
    ["position"],
)
SOURCE_DRAFTED = _by(
    "source", SOURCES, "aerie_source_drafts_verified_total", "Draft tokens that were verified."
)
SOURCE_ACCEPTED = _by(
    "source", SOURCES, "aerie_source_drafts_accepted_total", "Draft tokens that were accepted."
)
ACCEPTANCE = Gauge(
    "aerie_acceptance_estimate",
    "Estimated probability that a position is accepted, if those before it are.",
    ["position"],
)
GOODPUT = Gauge(
    "aerie_goodput_estimate_tokens_per_second",
    "Tokens per second that the policy expects of each K at the present batch.",
    ["k"],
)
DECODE_SECONDS = Counter(
    "aerie_decode_seconds_total",
    "Seconds of steps that made tokens, and of the drafter's reading in steps that made none.",
)
PLAIN_SECONDS = Counter(
    "aerie_decode_seconds_without_drafts_total",
    "Seconds that the same tokens would have taken at K = 0, estimated.",
)
STEP_SECONDS = _by("phase", PHASES, "aerie_step_seconds_total", "Seconds of engine steps.")
SWITCHES = Counter("aerie_k_switches_total", "Times the policy chose another K.")
PROBES = Counter("aerie_probes_total", "Probes, a few steps with another K, by kind.", ["kind"])
PROBE_SECONDS = Counter("aerie_probe_seconds_total", "Seconds lost to probes.")

# Heads that learn (app/engine/heads).
HEAD_GENERATION = Gauge(
    "aerie_head_generation",
    "Generation of the draft head that drafts; 0 is the one that the gateway was started with.",
)
# Their ratio, the accepted tokens of a draft, compares heads; no share does
# (app/engine/heads/drafts.py).
HEAD_DRAFTS = Counter(
    "aerie_head_drafts_verified_total",
    "Drafts of the head that were verified, one for each request and step, by the generation that "
    "drafted. The 8 that drafted last are exported.",
    ["generation"],
)
HEAD_ACCEPTED = Counter(
    "aerie_head_accepted_tokens_total",
    "Accepted tokens of the head's drafts, by the generation that drafted. The 8 that drafted last "
    "are exported.",
    ["generation"],
)
HEAD_SWAPS = _by(
    "outcome",
    ("done", "refused"),
    "aerie_head_swaps_total",
    "Swaps of the draft head, those of trials included.",
)
HEAD_SWAP_SECONDS = Histogram(
    "aerie_head_swap_seconds",
    "Longest pause between two steps that a swap of the draft head made.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
HEAD_TRIALS = _by(
    "verdict",
    ("kept", "kept_by_replay", "rolled_back"),
    "aerie_head_trials_total",
    "Trials of a generation in service that ended. Kept by the replay: service showed nothing.",
)

# Values of labels are the gateway's or the operator's: nothing that a client sends becomes one.
REFUSED = _by(
    "reason",
    ("admin", "concurrent", "key", "model", "overload", "requests", "tokens"),
    "aerie_requests_refused_total",
    "Requests refused before they reached the engine.",
)
EXPIRED = _by(
    "deadline",
    ("drain", "queue", "total"),
    "aerie_requests_expired_total",
    "Requests ended by a deadline of the gateway.",
)
NON_FINITE = Counter(
    "aerie_requests_non_finite_total",
    "Sequences of clients that were ended because the model computed logits that are not finite.",
)
STORED_RESPONSE_BYTES = Gauge(
    "aerie_stored_responses_bytes", "Bytes of /v1/responses that are kept in memory."
)
ADMISSION_WAITING = Gauge("aerie_gate_waiting", "Requests in the admission queue.")
ADMISSION_RUNNING = Gauge("aerie_gate_running", "Sequences that the admission queue has admitted.")
ADMISSION_SECONDS = Histogram(
    "aerie_gate_wait_seconds",
    "Seconds that requests waited in the admission queue; vLLM's own times begin after it.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RESPONSES = Counter(
    "aerie_responses_total",
    "Answers on paths that run the model or tokenizer; status 499, or `none`, if the client left "
    "first.",
    ["path", "status"],
)
TENANT_TOKENS = Counter(
    "aerie_tenant_tokens_total",
    "Tokens used: `prompt`, `output`, and `tokenized` by requests to the tokenizer alone.",
    ["tenant", "kind"],
)
KEY_RELOADS = _by(
    "result", ("done", "failed"), "aerie_key_reloads_total", "Times the keys file was read again."
)
KEYS_FILE_STALE = Gauge(
    "aerie_keys_file_stale",
    "1 while older keys are in force because the keys file is empty, torn, broken or gone.",
)
BACKGROUND_FAILURES = _by(
    "task",
    (
        *("engine_watch", "head_generations", "keys_file", "learner", "redis_leases"),
        "speculation_metrics",
    ),
    "aerie_background_failures_total",
    "Times that a background task ended unexpectedly and was started again.",
)
LIMITER_FALLBACKS = Counter(
    "aerie_limiter_fallbacks_total", "Rate limit decisions made without the shared Redis."
)
CONNECTIONS_REFUSED = _by(
    "reason",
    ("connections", "framing", "headers", "slow_body", "slow_headers", "slow_reader"),
    "aerie_connections_refused_total",
    "Connections closed for breaking a limit.",
)

LEARNING_SEQUENCES = Counter(
    "aerie_learning_captured_sequences_total", "Sequences that were captured to learn from."
)
LEARNING_TOKENS = Counter(
    "aerie_learning_captured_tokens_total", "Tokens in the answers of captured sequences."
)
LEARNING_DROPPED = _by(
    "reason",
    ("queue", "stopped"),
    "aerie_learning_dropped_sequences_total",
    "Sequences that were not captured because too many waited to be written, or because capture "
    "had stopped.",
)
LEARNING_BYTES = Gauge("aerie_learning_bytes", "Bytes of captured sequences in the folder.")
LEARNING_STOPPED = Gauge(
    "aerie_learning_capture_stopped",
    "1 after the file system refused captured sequences, until it takes some again.",
)


def count_speculation(state: dict[str, Any], last: dict[str, Any] | None) -> None:
    """Export a state of the policy (Controller.snapshot); counters grow by what is new since
    `last`, the state before it of the same engine."""

    def grow(counter: Any, path: str, index: int | str | None = None) -> float:
        now, before = _at(state, path, index), _at(last, path, index) if last else 0.0
        # Less than before: it is another engine, and all of it is new.
        new = now - before if now >= before else now
        counter.inc(new)
        return new

    K.set(state["batch_k"])
    DRAFT_TOKENS_PER_STEP.set(state["k_max"])
    for objective in OBJECTIVES:
        OBJECTIVE.labels(objective).set(state["objective"] == objective)
    for k in range(state["k_max"] + 1):
        steps = grow(STEPS.labels(str(k)), "totals.steps", k)
        STEPS_K.inc(k * steps)
    if HEAD in state["available_sources"]:
        # Without a head, K may be that of vLLM's own lookup (V2), and so are these counts: they are
        # among those of the sources below.
        for position in range(state["k_max"]):
            grow(DRAFTED.labels(str(position + 1)), "totals.drafted", position)
            grow(ACCEPTED.labels(str(position + 1)), "totals.accepted", position)
    for source in SOURCES:
        grow(SOURCE_DRAFTED.labels(source), f"totals.sources.{source}.drafted")
        grow(SOURCE_ACCEPTED.labels(source), f"totals.sources.{source}.accepted")
    for entry in state["acceptance"]:
        ACCEPTANCE.labels(str(entry["position"])).set(entry["conditional"])
    for entry in state["costs"]:
        GOODPUT.labels(str(entry["k"])).set(entry["tokens_per_second"])
    grow(DECODE_SECONDS, "totals.decode_seconds")
    grow(PLAIN_SECONDS, "totals.plain_seconds")
    for phase in PHASES:
        grow(STEP_SECONDS.labels(phase), "totals.phases", phase)
    grow(SWITCHES, "switches")
    for kind in state["probes"]:
        grow(PROBES.labels(kind), "probes", kind)
    grow(PROBE_SECONDS, "probe_seconds")


def _at(state: dict[str, Any], path: str, index: int | str | None) -> float:
    value: Any = state
    for name in path.split("."):
        value = value[name]
    return float(value if index is None else value[index])
