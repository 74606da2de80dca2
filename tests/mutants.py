"""Faults put into control, admission and verification one at a time: do their tests fail?

`python -m tests.mutants [NAME ...]` tries the faults of the modules with such a NAME, or all, each
in a copy of the tree and with the tests named beside it. It prints a line for each fault: killed,
or survived.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".venv", ".git", "node_modules", "__pycache__")


class Faults(NamedTuple):
    """The faults of one module."""

    tests: str  # files, below the folder of tests that mirrors the module's part of the tree
    edits: list[tuple[str, str]]  # code of the module, and what it becomes


FAULTS = {
    "drafters/control/acceptance.py": Faults(
        "control/test_acceptance control/sources/test_lookup_gains",
        [
            ("by_equal[equal] += 1", "by_equal[compared] += 1"),
            ("min(compared, equal + 1)", "compared"),
            ("* count / drafted_before", ""),
            ("self._fade(requests)", "pass"),
            ("share *= rate", "share = rate"),
            ("load.requests_drafted_at(position) * share", "load.requests * share"),
        ],
    ),
    "drafters/control/cost_table.py": Faults(
        "control/test_cost_table control/test_disturbance",
        [
            (
                "rising = monotone(logarithms, [",
                "rising = list(logarithms)\n        monotone(logarithms, [",
            ),
            ("share = (k - low) / (high - low)", "share = 0.0"),
            ("deviation = max(-largest, min(largest, deviation))", "pass"),
            ("self._pace += machine_share", "self._pace -= machine_share"),
            ("+ tuning.cost_noise * age_s", ""),
            ("share * self._log_seconds_at(high", "share * self._log_seconds_at(low"),
        ],
    ),
    "drafters/control/read_costs.py": Faults(
        "control/test_controller",
        [
            ("return min(target, drafter)", "return max(target, drafter)"),
        ],
    ),
    "drafters/control/traffic.py": Faults(
        "control/test_traffic",
        [
            ("self.unread_tokens_per_request = 0.0\n            return", "return"),
            ("1.0 / min(self._steps, self._memory_steps)", "1.0 / self._memory_steps"),
        ],
    ),
    "drafters/control/learning.py": Faults(
        "control/test_learning control/sources/test_choice",
        [
            (
                "if k_drafted != self._k_of_verification_cost(step) or step.looked_up:",
                "if step.looked_up:",
            ),
            ("return k_drafted > 0 or self._traffic.is_settled", "return True"),
            ("seconds = step.seconds - reading_s", "seconds = step.seconds"),
            ("self._read_costs.variance_beside(reading_s, seconds)", "0.0"),
            ("if step.others or step.looked_up:", "if False:"),
        ],
    ),
    "drafters/control/controller.py": Faults(
        "control/test_controller control/test_probe_loss",
        [
            ("(1.0 + self._tuning.hysteresis)", "1.0"),
            ("return account.forgone_seconds >= account.catch_up_seconds", "return True"),
            ("self._leaving_zero.is_free = self._uses(self._drafter) and not drafted", "pass"),
            ("self._probes.allows(k, lost_seconds * rate, self._busy_s)", "True"),
            ("seconds * rate - made)", "seconds * rate)"),
            ("self._busy_s, steps_before)", "self._busy_s, 0)"),
            ("if self._k and self._batch_steps < steps:", "if False:"),
            (
                "if not load.requests:  # it only reads prompts, and belongs to no batch",
                "if False:",
            ),
        ],
    ),
    "drafters/control/predictions.py": Faults(
        "control/test_predictions control/test_package",
        [
            ("prompt_share * self._read_costs.measured_drafter_seconds_per_token", "0.0"),
            ("costs[self.captured_k(load.cost_k(k))]", "costs[k]"),
            ("read_s = target_s + drafter_s if k else target_s", "read_s = target_s"),
            ("drafter_s = self._read_costs.measured_drafter_seconds_per_token", "drafter_s = 0.02"),
        ],
    ),
    "drafters/control/probes.py": Faults(
        "control/test_probes control/test_probe_loss",
        [
            ("by_k[k].seconds / by_k[k].times_as_good", "by_k[k].seconds"),
            ("if not drafter_may_draft:", "if False:"),
            ("lost + catch_up_s", "lost + 0.0"),
            ("if k == 0 and busy_s", "if busy_s"),
            ("self._plain_began_s = busy_s", "pass"),
        ],
    ),
    "drafters/control/sources/planner.py": Faults(
        "control/sources/test_planner",
        [
            ("self._lookups is not None and LOOKUP in self._in_use", "self._lookups is not None"),
            ("best_worth(survival, prices)", "best_worth(survival, [0.0] * 99)"),
        ],
    ),
    "drafters/control/sources/draft_plan.py": Faults(
        "control/sources/test_draft_plan",
        [
            ("if candidate.forgone >= plan.read_price * candidate.unread:", "if True:"),
            ("if gained <= price:", "if False:"),
            ("head_k = k if reads_prompts else 0", "head_k = 0"),
        ],
    ),
    "drafters/control/sources/lookup_gains.py": Faults(
        "control/sources/test_lookup_gains",
        [
            ("by_class.setdefault(match_class(length), [])", "by_class.setdefault(0, [])"),
            ("worth.gain >= self._margin * prices[worth.tokens]", "True"),
        ],
    ),
    "drafters/control/sources/verification_costs.py": Faults(
        "control/sources/test_verification_costs",
        [
            ("if mean or settled:", "if True:"),
            ("scaled = plain + max(0.0, share * (seconds - plain))", "scaled = seconds"),
            ("step.draft_seconds - reading_s", "reading_s"),
            (" - load.cut_tokens", ""),
            ("first_s + further_s * n", "further_s * (n + 1)"),
            ("if start >= 0.0:", "if False:"),
            ("load.requests_drafted_at(0) - step", "load.requests - step"),
        ],
    ),
    "app/admission/queue.py": Faults(
        "admission/test_queue",
        [
            ("self._running_by_tenant[w.tenant.name], w.arrival", "w.arrival"),
            ("self.release(slot.result())", "pass"),
            ("self._remove(waiter)\n                self.dispatch()", "self._remove(waiter)"),
            (" and not self.saturated()", ""),
            ("return lasting and", "return"),
            ("if not self.waiting and self._fits(sequences):", "if self._fits(sequences):"),
            ("min(sequences, max(1, self.slots() // LARGE_REQUEST_SHARE))", "sequences"),
        ],
    ),
    "app/admission/limiter.py": Faults(
        "admission/test_limiter",
        [
            ("bucket.level += charged - used", "pass"),
            ("state.places.discard(lease)", "pass"),
            ("min(float(limit), filled), now", "filled, now"),
        ],
    ),
    "app/admission/estimate.py": Faults(
        "admission/test_estimate",
        [
            ("output_tokens * sequences", "output_tokens"),
        ],
    ),
    "app/admission/tenants.py": Faults(
        "admission/test_keys",
        [
            ("if not 0 < len(secret) <= MAX_KEY_LENGTH:", "if False:"),
        ],
    ),
    "app/admission/controller.py": Faults(
        "llm/test_engine_load",
        [
            ("self.load.queued > self._slots() * EXTRA_SLOTS_SHARE", "False"),
        ],
    ),
    "drafters/vllm/verification/seeded_sampling.py": Faults(
        "vllm/verification/test_seeded_sampling",
        [
            ("right.long().cumprod(1).sum(1", "right.long().sum(1"),
            ("columns <= accepted, own", "columns < accepted, own"),
            ("right = (columns < counts) & (", "right = ("),
            ("(position + offset + 1)", "(position + 1)"),
            ("start += count", "start += 1"),
            ("torch.where(greedy, likeliest, ", "torch.where(~greedy, likeliest, "),
        ],
    ),
    "drafters/vllm/verification/greedy.py": Faults(
        "vllm/verification/test_greedy",
        [
            ("and sampling.no_penalties\n", ""),
            ("return name is None or ", "return "),
        ],
    ),
    "drafters/vllm/verification/finite.py": Faults(
        "vllm/verification/test_finite",
        [
            ("~(sums < torch.inf)", "sums.isnan()"),
            ("[ends - 1]", "[ends.clamp(max=len(rows) - 1)]"),
        ],
    ),
    "drafters/vllm/verification/sampled_drafts.py": Faults(
        "vllm/verification/test_sampled_drafts",
        [
            ("self.made[rows] + offsets", "self.made[rows]"),
        ],
    ),
    "drafters/vllm/verification/synthetic.py": Faults(
        "vllm/verification/test_synthetic",
        [
            ("(others + 1) % logits.shape[-1]", "others"),
        ],
    ),
}


def test_files(module: str) -> list[str]:
    """The test files that have to fail for each fault of a module."""
    folder = "tests/app" if module.startswith("app/") else "tests/drafters"
    return [f"{folder}/{name}.py" for name in FAULTS[module].tests.split()]


def is_killed(tree: Path, module: str, code: str, fault: str) -> bool:
    """Whether tests fail in `tree`, a copy of the repository, while its module has the fault."""
    file = tree / module
    text = file.read_text("utf-8")
    if text.count(code) != 1:
        raise SystemExit(f"{module} has {text.count(code)} times {code!r}")
    file.write_text(text.replace(code, fault), "utf-8")
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", *test_files(module)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        file.write_text(text, "utf-8")
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return run.returncode == 1


def main() -> None:
    """Try the faults of the modules that the command line names."""
    names = sys.argv[1:] or [""]
    tried = survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=NOT_COPIED)
        for module in (each for each in FAULTS if any(name in each for name in names)):
            for code, fault in FAULTS[module].edits:
                killed = is_killed(tree, module, code, fault)
                tried += 1
                survivors += not killed
                before, after = (" ".join(text.split()) for text in (code, fault or "(nothing)"))
                verdict = "killed" if killed else "SURVIVED"
                print(f"{verdict:8} {module}: {before} -> {after}", flush=True)
    print(f"{tried - survivors} of {tried} killed")


if __name__ == "__main__":
    main()
