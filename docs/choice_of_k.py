"""Write docs/choice-of-k.md from the controller's own figures: python -m docs.choice_of_k"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.policy import Load
from drafters.markdown import columns

PAGE = Path(__file__).with_name("choice-of-k.md")
K_MAX = 5
# Median milliseconds of steps of SmolLM2-135M on two cores, by requests and K, and how many of
# 1,000 drafts were accepted up to each position: recorded while it answered HumanEval prompts.
MILLISECONDS = {
    1: (19.5, 25.9, 24.2, 24.3, 23.9, 24.9),
    4: (23.2, 28.4, 28.2, 29.7, 32.7, 35.7),
    16: (28.1, 41.0, 47.8, 51.8, 56.1, 60.4),
    32: (38.7, 110.3, 113.2, 135.3, 144.6, 153.8),
}
DRAFTS, ACCEPTED = 1000, (580, 273, 139, 52, 29)
EXAMPLE = 4  # requests
BAR = 40  # characters of the longest bar
TEXT = """\
# How K is chosen

Made from `drafters/control` by `python -m docs.choice_of_k`; a test keeps it so.

[K](glossary.md#k) is how many draft tokens of the head each request gets in a step. More draft
tokens make more tokens a step, and longer steps. The controller chooses the K with the most tokens
per second. It knows two things: what a step takes at each K, and how often a draft token is
accepted at each position. This page follows them from a load to a K, with the figures of
SmolLM2-135M on two cores.

## One choice

{example} requests are running. Steps were timed at each K, and of {drafts:,} drafts {first} were
accepted at the first position, {second} also at the second, and so on.

Tokens of a step: each request makes one by itself, and as many as are accepted on average. `si` is
the share of drafts that are accepted up to position i.

    tokens(K) = requests * (1 + s1 + s2 + ... + sK),  s1 = {s1}, s2 = {s2}, ...
    tokens({best}) = {example} * (1 + {sum}) = {tokens}

Tokens per second: divide by the seconds of a step. The best K is marked.

    {example} requests: tokens(K) / seconds(K)

{figure}

K = 1 and K = 2 were timed at {first_ms} and {second_ms} ms: as costs never fall with K, both count
with the mean (*Order*, below). And each position counts as if {prior:g} more draft tokens had been
accepted at the rate of the one before it, so that s2 is {s2} where {second} of {drafts:,} were
accepted.

## Every load has its own K

The same acceptance, and the times of steps with more requests. With many of them the two cores are
busy without drafts. With 32, K = 1 doubles the tokens that the [target](glossary.md#target)
computes, and a step takes 110 ms instead of 39: K = 0 is best.

{table}

## In the order of a step

1. `DraftingScheduler` puts a step together and describes it as a `Load`: how many requests decode,
   how many draft tokens are verified, how many prompt tokens are read
   (`drafters/control/policy.py`).
2. `Controller.choose` returns K for the drafter pass at the end of that step. These draft tokens
   are verified in the next step.
3. The step runs. `Controller.observe` gets its seconds, its tokens, and how many draft tokens were
   verified and accepted at each position.
4. `Acceptance` counts them. `CostTable` averages the seconds of *steady* steps: those that verify
   as many draft tokens as they draft. `ReadCosts` learns what prompts take.
5. From these, `choose` predicts every K again (`predictions.py`), at once when the batch changes
   and else every few steps. At K > 0 the drafter also reads every prompt: its seconds of reading
   per output token, times the tokens of the step, are added to those of the step.

On a GPU only some K have CUDA graphs (`captured_ks`). Only these are chosen, and a fixed K that is
none of them becomes the next smaller one. A step whose drafts lie between two such K runs in the
graph of the larger one, so that its seconds count for that one.

## Head or lookup

Where the text repeats itself, a [lookup](glossary.md#lookup) drafts what followed at the earlier
place, without a pass of the head. Only the worker knows the newest tokens before that pass runs.
So the scheduler sends a `DraftPlan` with each step (`drafters/control/sources/`), in tokens:

    gain of n draft tokens = tokens accepted of them - tokens per second * seconds to verify them

- For each class of match lengths: the n with the largest gain, and that gain. It must be a quarter
  of the price or more, since both are estimates.
- The gain of the head for one request, and the price of its pass: the tokens that the batch would
  make in the same time.

The worker takes the better source for each request. It skips the pass if the head would gain less
over the lookups than the pass costs. Without a lookup that pays, the step is one of the head alone,
at the K that was chosen as above. The head reads what it missed once the drafts that it could have
made meanwhile would have saved that much time ([catch-up](glossary.md#catch-up)).

While lookups are in use, every match is compared with the tokens that then come, whether a lookup
drafted them or not. That tells what lookups are worth while none is tried, and a failed lookup does
not count against the head. Seconds are learnt in two parts: those of the target, by the mean number
of draft tokens that it verifies, and those of the head's pass. So each price is known without the
other. Prices of n draft tokens lie on a line through those that were measured: singly, each errs by
itself, and the largest gain would be that of the price that errs most. A pass that also reads a
prompt, or what the head had missed, tells nothing of its price. Where few of many requests have
drafts, what the step took beyond one without drafts is scaled up to one draft token of each request
(`verification_costs.py`).

vLLM's [V2 runner](glossary.md#v1-and-v2-model-runner), the first choice on a GPU, has no such plan:
the newest tokens are on the device alone. Beside a head nothing is looked up there, and what a
grammar forces is not drafted. `GET /v1/speculation` names both in `absent_sources`, and
`VLLM_USE_V2_MODEL_RUNNER=0` starts an engine that has them, on a GPU
[at a price](gpu.md#v1-in-place-of-v2). Without a head vLLM's own lookup runs on the device. All
requests then get the same number of looked-up tokens; on V1 each gets its own.

## What keeps a choice from being a guess

- **Hysteresis.** Another K must promise {hysteresis:.0%} more than the one in force.
- **Probes.** An estimate grows old: its variance rises with time, and with the distance to the
  batch that was measured. A K is tried if it would beat the one in force with its cost and its
  acceptance each {optimism:g} standard deviations better: for {probe_steps} steady steps, and one
  more that makes the first drafts. K = 0, without any drafts, is tried when its cost is uncertain,
  as the speed-up is counted from it. Probes may lose {share:.1%} of the tokens; one of K = 0 may
  begin every {plain_probe:g} s whatever was lost (`probes.py`).
- **Leaving K = 0.** The drafter must first read what was written meanwhile. The controller waits
  until drafts would have saved that much time.
- **Pace.** A busy neighbour slows steps at every K. What a well-known cost does not explain is the
  machine's pace, averaged over the last {pace} steps, and moves the costs of all K.
- **Order.** More draft tokens never make a step shorter. Estimates that say so are averaged, each
  with the weight of its certainty.
- **Pauses.** A step that takes far longer than its estimate counts as {outlier:g} standard
  deviations at most.

`Objective` can fix K, switch drafts off, or hold a time per token
([speculation.md](speculation.md#objectives)). `StepLearner.plain_seconds` estimates what the tokens
of a step would have taken at K = 0. The speed-up is counted from their sum, `totals.plain_seconds`
of the state. Constants are in `tuning.py`, each with its reason. Why the controller has these parts
and no others: [decision 0027](decisions/0027-readable-controller.md).
"""


def page() -> str:
    """The page as it should be."""
    controller = _controller()
    rows = _rows(controller, EXAMPLE)
    best = max(rows, key=lambda row: row["tokens_per_second"])
    shares = controller.acceptance.survival()
    tuning = controller._tuning
    return TEXT.format(
        example=EXAMPLE,
        drafts=DRAFTS,
        first=ACCEPTED[0],
        second=ACCEPTED[1],
        s1=f"{shares[0]:.3f}",
        s2=f"{shares[1]:.3f}",
        first_ms=MILLISECONDS[EXAMPLE][1],
        second_ms=MILLISECONDS[EXAMPLE][2],
        prior=tuning.prior_trials,
        best=best["k"],
        sum=f"{sum(shares[: best['k']]):.3f}",
        tokens=f"{best['step_tokens']:.2f}",
        figure=_figure(rows, best),
        table=_table(controller),
        hysteresis=tuning.hysteresis,
        optimism=tuning.optimism,
        probe_steps=tuning.probe_steps,
        share=tuning.probe_share,
        plain_probe=tuning.plain_probe_s,
        pace=tuning.pace_memory_steps,
        outlier=tuning.outlier_deviations,
    )


def _controller() -> Controller:
    """A controller that knows the recorded times and acceptance."""
    controller = Controller(K_MAX)
    controller.load_calibration(
        Cell(requests, k, milliseconds / 1e3, steps=100)
        for requests, row in MILLISECONDS.items()
        for k, milliseconds in enumerate(row)
    )
    for _ in range(100):  # until nothing is left of the prior of the first position
        controller.acceptance.observe(DRAFTS, (DRAFTS,) * K_MAX, ACCEPTED)
    return controller


def _rows(controller: Controller, requests: int) -> list[Any]:
    """What the controller predicts of each K at `requests` requests."""
    controller.choose(Load(requests))
    return list(controller.snapshot()["costs"])


def _figure(rows: list[Any], best: Any) -> str:
    """A bar of tokens per second for each K."""
    lines = []
    for row in rows:
        rate = row["tokens_per_second"]
        length = round(BAR * rate / best["tokens_per_second"])
        figures = f"{row['step_tokens']:.2f} / {row['step_seconds']:.4f} s = {rate:3.0f}"
        mark = " <- chosen" if row is best else ""
        lines.append(f"    K = {row['k']}   {figures}  {'#' * length}{mark}")
    return "\n".join(lines)


def _table(controller: Controller) -> str:
    """Tokens per second by requests and K."""
    table = [["requests", *(f"K = {k}" for k in range(K_MAX + 1)), "best K"]]
    for requests in MILLISECONDS:
        rates = [row["tokens_per_second"] for row in _rows(controller, requests)]
        cells = [f"{rate:.0f}" for rate in rates]
        table.append([str(requests), *cells, str(rates.index(max(rates)))])
    return "\n".join(columns(table))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
