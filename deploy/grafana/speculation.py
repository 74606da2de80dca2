"""Dashboard *Speculation*: what drafting gains and costs, and how K follows the load."""

from __future__ import annotations

from typing import Any

from deploy.grafana.panel import (
    OURS,
    VLLM,
    Query,
    bars,
    board,
    cloud,
    heat_of_series,
    lines,
    number,
    rate,
    ratio,
)

DECODE, PLAIN = "aerie_decode_seconds_total", "aerie_decode_seconds_without_drafts_total"
STEPS, STEPS_K = "aerie_steps_total", "aerie_steps_k_total"
DRAFTED, ACCEPTED = "aerie_drafts_verified_total", "aerie_drafts_accepted_total"
BY_SOURCE = "aerie_source_drafts_verified_total", "aerie_source_drafts_accepted_total"
BY_GENERATION = "aerie_head_drafts_verified_total", "aerie_head_accepted_tokens_total"
TOKENS = "vllm:generation_tokens_total"
NOW = "5m"  # window of the figures at the top
GAIN = ((None, "red"), (0.97, "yellow"), (1.05, "green"))
SHARE = ((None, "red"), (0.3, "yellow"), (0.6, "green"))


def dashboard() -> Any:
    """The dashboard's builder."""
    return board(
        "aerie-speculation",
        "Speculation",
        "What parallel drafting gains against no speculation, and how K follows the load.",
        (_now, _gain, _load, _sources, _acceptance, _policy, _learning),
    )


def _now() -> tuple[str, list[Any]]:
    speedup = ratio(PLAIN, DECODE, window=NOW)
    drafts = rate("vllm:spec_decode_num_drafts_total", labels=VLLM, window=NOW)
    accepted = rate("vllm:spec_decode_num_accepted_tokens_total", labels=VLLM, window=NOW)
    return "Now", [
        number(
            "Speed-up",
            "Seconds that the tokens of the last five minutes would have taken without drafts, "
            "over the seconds they took. The counterfactual is estimated from measured steps at "
            "K = 0.",
            Query(speedup, "speed-up"),
            unit="suffix:×",
            steps=GAIN,
        ),
        number(
            "Output",
            "Tokens of answers per second.",
            Query(rate(TOKENS, labels=VLLM, window=NOW), "tokens/s"),
            unit="short",
            decimals=0,
        ),
        number(
            "Acceptance length",
            "Tokens that a drafted step of one request makes, the target's own included. Drafts "
            "of K tokens make between 1 and K + 1.",
            Query(f"1 + {accepted} / ({drafts} > 0)", "tokens"),
        ),
        number(
            "Mean K",
            "Drafted tokens per request of the average step, steps without drafts included.",
            Query(ratio(STEPS_K, STEPS, window=NOW), "K"),
        ),
        number(
            "Steps without drafts",
            "Share of steps with K = 0, in which the head drafts nothing; a lookup may. "
            "Under heavy load it should be high.",
            Query(
                f'sum(rate({STEPS}{{{OURS}, k="0"}}[{NOW}])) / ({rate(STEPS, window=NOW)} > 0)',
                "share",
            ),
            unit="percentunit",
            decimals=0,
        ),
        number(
            "Cost of probes",
            "Share of decoding time lost to probes of another K, which keep the estimates fresh.",
            Query(ratio("aerie_probe_seconds_total", DECODE, window=NOW), "share"),
            unit="percentunit",
            decimals=1,
            steps=((None, "green"), (0.03, "yellow"), (0.1, "red")),
        ),
    ]


def _gain() -> tuple[str, list[Any]]:
    tokens = rate(TOKENS, labels=VLLM)
    return "What drafting gains", [
        lines(
            "Speed-up against no speculation",
            "Above 1 drafting saves time. At K = 0 it is about 1 by itself: nothing is gained or "
            "lost.",
            [Query(ratio(PLAIN, DECODE), "speed-up")],
            unit="suffix:×",
        ),
        lines(
            "Tokens per second, and without drafts",
            "Output as it is, and as it would be if the same steps had been taken at K = 0: output "
            "divided by the speed-up. Under a load that leaves the engine idle, users would see "
            "the difference as latency.",
            [
                Query(tokens, "as it is"),
                Query(f"{tokens} * {rate(DECODE)} / ({rate(PLAIN)} > 0)", "without drafts"),
            ],
        ),
        _phases(),
    ]


def _phases() -> Any:
    share = f"{rate('aerie_step_seconds_total', 'phase')} / ignoring (phase) group_left () "
    return lines(
        "Where steps spend their time",
        "Share of the steps' time by phase. target: the target model, which verifies drafts as it "
        "makes tokens. draft: the head. control: choosing K. other: scheduling, and all between "
        "engine and worker.",
        [Query(f"{share}({rate('aerie_step_seconds_total')} > 0)", "{{phase}}")],
        unit="percentunit",
        most=1,
        stacked=True,
        width=24,
    )


def _load() -> tuple[str, list[Any]]:
    running = Query(f"sum(vllm:num_requests_running{{{VLLM}}})", "requests running")
    mean_k = Query(ratio(STEPS_K, STEPS), "mean K")
    return "K and the load", [
        heat_of_series(
            "Steps by K",
            "Which K the steps drafted, as steps per second. The policy spreads over several K "
            "while it learns, and jumps when the load does.",
            Query(rate(STEPS, "k"), "{{k}}"),
            unit="ops",
            axis="K",
        ),
        lines(
            "Load and mean K",
            "Requests in the batch, and the K that was chosen for them: it should fall where the "
            "load rises.",
            [running, mean_k],
        ),
        cloud(
            "K against load",
            "A point for each moment: requests in the batch across, mean K up.",
            running,
            mean_k,
        ),
        lines(
            "Changes of K",
            "How often the policy chose another K. Many times per second: it is unstable.",
            [Query(rate("aerie_k_switches_total"), "switches")],
            unit="ops",
        ),
    ]


def _sources() -> tuple[str, list[Any]]:
    verified, accepted = BY_SOURCE
    share = f"{rate(accepted, 'source')} / ignoring (source) group_left () "
    return "Where drafts come from", [
        lines(
            "Drafted tokens by source",
            "Draft tokens that were verified, per second. head: the draft head. lookup: what "
            "followed the same words earlier in the request's own text. grammar: what a schema "
            "leaves no choice about.",
            [Query(rate(verified, "source"), "{{source}}")],
            stacked=True,
        ),
        lines(
            "Answers by source",
            "Share of all output tokens that were accepted drafts of a source. The rest the target "
            "chose itself.",
            [Query(f"{share}({rate(TOKENS, labels=VLLM)} > 0)", "{{source}}")],
            unit="percentunit",
            most=1,
            stacked=True,
        ),
        lines(
            "Accepted by source",
            "Of the draft tokens of a source, the share that was accepted. A lookup may be long "
            "where drafts cost little, so that a low share is no fault by itself.",
            [Query(ratio(accepted, verified, "source"), "{{source}}")],
            unit="percentunit",
            most=1,
        ),
    ]


def _acceptance() -> tuple[str, list[Any]]:
    conditional = f"avg by (position) (aerie_acceptance_estimate{{{OURS}}})"
    return "Acceptance", [
        bars(
            "Accepted by position, now",
            "Of the head's drafts verified at a position in the last five minutes, the share "
            "accepted. "
            "It falls with the position, since one refusal refuses all that follow.",
            Query(ratio(ACCEPTED, DRAFTED, "position", window=NOW), "{{position}}"),
            unit="percentunit",
            most=1,
            steps=SHARE,
        ),
        heat_of_series(
            "Accepted by position, over time",
            "The same as colour. A stripe that goes dark in all rows is a change of traffic; "
            "one that only fades at the end asks for a smaller K.",
            Query(ratio(ACCEPTED, DRAFTED, "position"), "{{position}}"),
            unit="percentunit",
            axis="position",
            width=16,
        ),
        lines(
            "What the policy believes",
            "Chance that a position is accepted if those before it were. Positions that are not "
            "drafted fall back to what the position before them shows.",
            [Query(conditional, "{{position}}")],
            unit="percentunit",
            most=1,
        ),
        lines(
            "Accepted tokens per second",
            "Tokens that came from drafts, beside all tokens.",
            [
                Query(
                    rate("vllm:spec_decode_num_accepted_tokens_total", labels=VLLM), "from drafts"
                ),
                Query(rate(TOKENS, labels=VLLM), "all"),
            ],
        ),
    ]


def _policy() -> tuple[str, list[Any]]:
    return "The policy at work", [
        lines(
            "What it expects of each K",
            "Tokens per second that the policy expects at the present batch. The highest is "
            "chosen, unless the objective says otherwise.",
            [
                Query(
                    f"sum by (instance, k) (aerie_goodput_estimate_tokens_per_second{{{OURS}}})",
                    "{{instance}} K = {{k}}",
                )
            ],
        ),
        lines(
            "Objective",
            "What K is chosen for; 1 for the one in force.",
            [Query(f"max by (objective) (aerie_objective{{{OURS}}})", "{{objective}}")],
            most=1,
        ),
        lines(
            "Probes",
            "Probes, a few steps with another K, by kind.",
            [Query(rate("aerie_probes_total", "kind"), "{{kind}}")],
            unit="ops",
        ),
    ]


def _learning() -> tuple[str, list[Any]]:
    verified, accepted = BY_GENERATION
    swaps = rate("aerie_head_swap_seconds_sum"), rate("aerie_head_swap_seconds_count")
    return "Heads that learn", [
        lines(
            "Accepted tokens of a draft by generation of the head",
            "How many tokens of a generation's draft were accepted. It also falls with K, so under "
            "a higher load: compare generations at the same hours. While one is tried, two draft "
            "in turn; 0 is the head that the gateway was started with.",
            [
                Query(
                    ratio(accepted, verified, "instance, generation"),
                    "{{instance}} generation {{generation}}",
                )
            ],
        ),
        lines(
            "Generation that drafts",
            "It rises when a trial keeps a new one, and falls when an operator pins an older one.",
            [Query(f"max by (instance) (aerie_head_generation{{{OURS}}})", "{{instance}}")],
        ),
        lines(
            "Trials and swaps",
            "Trials that ended, by verdict, and swaps, of which a trial needs several, by outcome.",
            [
                Query(rate("aerie_head_trials_total", "verdict"), "trial: {{verdict}}"),
                Query(rate("aerie_head_swaps_total", "outcome"), "swap: {{outcome}}"),
            ],
            unit="ops",
        ),
        lines(
            "Pause of a swap",
            "The longest time between two steps for which a swap held the engine up, on average.",
            [Query(f"{swaps[0]} / ({swaps[1]} > 0)", "pause")],
            unit="s",
        ),
    ]
