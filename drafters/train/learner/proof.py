"""The replay of a candidate: does it draft better than the head in force, and for whom?

Both heads draft behind answers that were held back. What counts is how many steps the same answers
take: the ratio of the numbers of steps is that of the acceptance lengths. Its interval is made by
resampling prompts, each with the steps of its answers under both heads: answers to one prompt are
much alike, and six of them do not tell what six prompts would; so are the turns of a conversation,
which count as one prompt. On the texts of the mix the candidate is compared with the first head
too: what each generation forgets a little of is much after ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafters.train.data.token_sequences import Text
from drafters.train.evaluation.answers import Answers
from drafters.train.evaluation.evaluate_head import load_fitting_head, measure
from drafters.train.evaluation.statistics import draw_weights, ratio_intervals
from drafters.train.learner.sequences import LEAST_OF_TENANT, LEAST_PROMPTS
from drafters.train.target import FrozenTarget

WORSE = 0.98  # a ratio of acceptance lengths below this is too bad for any group
# Below this it is no chance even of a tenant of one prompt. With a standard deviation of 3%, which
# eight answers to one prompt have at most, a head that gains nothing is found there in 0.04%.
_RUINED = 0.9


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two heads on the same answers."""

    answers: int
    prompts: int  # different ones; the turns of a conversation count as one
    tokens: int  # written in steps that may have drafts: all but each answer's first
    before: float  # acceptance length of the head in force
    after: float  # of the candidate
    ratio: float  # after / before
    interval: tuple[float, float] | None  # 95%, of the ratio; None of a single prompt

    @property
    def better(self) -> bool:
        """Whether the candidate is better with 95% confidence."""
        return self.interval is not None and self.interval[0] > 1.0

    @property
    def worse(self) -> bool:
        """Whether the candidate is too much worse, with 95% confidence. Of too few prompts for an
        interval that says something, the ratio alone decides."""
        if self.interval is None or self.prompts < LEAST_PROMPTS:
            return self.ratio < WORSE
        return self.interval[1] < WORSE


@dataclass(frozen=True, slots=True)
class Judged:
    """Captured texts that were held back, one at least."""

    texts: Sequence[Text]
    tenants: Sequence[str]  # of each
    conversations: Sequence[int] | None  # of each; None in a round that did not know them


@dataclass(frozen=True, slots=True)
class CandidateReplay:
    """How a candidate compares with the head in force."""

    captured: Comparison
    tenants: dict[str, Comparison]  # those with enough answers
    mix: Comparison | None  # None without a mix
    few_prompts: Comparison | None = None  # the tenants with fewer than LEAST_PROMPTS, all together
    mix_against_first: Comparison | None = None  # with the first head; None where that is in force

    def objection(self) -> str | None:
        """Why the candidate is refused; None if it is favoured."""
        few = {name for name, item in self.tenants.items() if item.prompts < LEAST_PROMPTS}
        worse = [
            name
            for name, item in sorted(self.tenants.items())
            if (item.ratio < _RUINED if name in few else item.worse)
        ]
        if not worse and self.few_prompts is not None and self.few_prompts.worse:
            # The ratios of many such tenants are by chance below 0.98 here and there.
            if len(few) > 1:
                return "worse for the tenants of few prompts together"
            worse = sorted(few)
        if worse:
            return f"worse for the tenant {worse[0]!r}"
        if any(
            found is not None and found.ratio < WORSE
            for found in (self.mix, self.mix_against_first)
        ):
            return "worse on the texts that are mixed in"
        return None if self.captured.better else "not better on captured answers"

    def figures(self) -> dict[str, Any]:
        """The comparison as it is kept in a generation's provenance."""
        return {
            "captured": asdict(self.captured),
            "tenants": {name: asdict(item) for name, item in self.tenants.items()},
            "few_prompts": asdict(self.few_prompts) if self.few_prompts else None,
            "mix": asdict(self.mix) if self.mix else None,
            "mix_against_first": asdict(self.mix_against_first) if self.mix_against_first else None,
        }


def replay(
    target: FrozenTarget,
    heads: tuple[Path, Path],  # the one in force, the candidate
    captured: Judged,
    mix: Sequence[Text],
    k: int,
    first: Path | None = None,
) -> CandidateReplay:
    """Compare two heads on texts that neither was trained on in this round, with `k` drafts; the
    candidate on the texts of the mix with the `first` head too, where that is not in force."""
    texts = [*captured.texts, *mix]
    folders = [*heads, first] if mix and first is not None else heads
    before, after, *of_first = _steps(target, folders, texts, k)
    tokens = torch.tensor([len(text.tokens) - text.prompt for text in texts]) - 1
    prompts = _prompt_numbers(texts)
    if captured.conversations is not None:
        prompts[: len(captured.texts)] = torch.tensor(captured.conversations)

    def of(part: slice, steps: torch.Tensor) -> Comparison:
        return compare(tokens[part], steps[part], after[part], prompts[part])

    own, mixed = slice(len(captured.texts)), slice(len(captured.texts), None)
    tenants, few_prompts = compare_tenants(captured.tenants, tokens, before, after, prompts)
    return CandidateReplay(
        captured=of(own, before),
        tenants=tenants,
        mix=of(mixed, before) if mix else None,
        few_prompts=few_prompts,
        mix_against_first=of(mixed, of_first[0]) if of_first else None,
    )


def compare_tenants(
    names: Sequence[str],
    tokens: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    prompts: torch.Tensor,
) -> tuple[dict[str, Comparison], Comparison | None]:
    """Compare for each tenant with enough answers, and for those with fewer than LEAST_PROMPTS all
    together; None without such. `names` has the tenants of the first answers, the others are of
    the mix; the rest is as in `compare`."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)

    def of(rows: list[int]) -> Comparison:
        return compare(tokens[rows], before[rows], after[rows], prompts[rows])

    found = {name: of(rows) for name, rows in rows_of.items() if len(rows) >= LEAST_OF_TENANT}
    few = [name for name, item in found.items() if item.prompts < LEAST_PROMPTS]
    together = [row for name in few for row in rows_of[name]]
    return found, of(together) if together else None


def _steps(
    target: FrozenTarget, folders: Sequence[Path], texts: Sequence[Text], k: int
) -> list[torch.Tensor]:
    """The steps that each text's answer takes with `k` drafts of each head: int64 [texts]."""
    heads = [load_fitting_head(folder, target, "of the learner") for folder in folders]
    results = measure(heads, target, _answers(texts, k), counts=[k])
    return [result.results[k].steps for result in results]


def _prompt_numbers(texts: Sequence[Text]) -> torch.Tensor:
    """A number for each text's prompt, the same for equal prompts: int64 [texts]."""
    numbers: dict[tuple[int, ...], int] = {}
    prompts = (tuple(text.tokens[: text.prompt].tolist()) for text in texts)
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])


def compare(
    tokens: torch.Tensor, before: torch.Tensor, after: torch.Tensor, prompts: torch.Tensor
) -> Comparison:
    """Compare by the steps that each answer takes; all are integers [answers]. `prompts` says which
    answers are to the same prompt, or of the same conversation."""
    count = int(tokens.sum())
    unique, rows = prompts.unique(return_inverse=True)
    interval = None
    if len(unique) > 1:
        steps = before.new_zeros(len(unique), 2).index_add(0, rows, torch.stack([before, after], 1))
        weights = draw_weights(len(unique), seed=0)
        low, high = ratio_intervals(steps[:, :1], steps[:, 1], weights)[0].tolist()
        interval = (round(low, 4), round(high, 4))
    return Comparison(
        answers=len(tokens),
        prompts=len(unique),
        tokens=count,
        before=round(count / int(before.sum()), 4),
        after=round(count / int(after.sum()), 4),
        ratio=round(int(before.sum()) / int(after.sum()), 4),
        interval=interval,
    )


def _answers(texts: Sequence[Text], k: int) -> Answers:
    """Texts as answers to replay. Behind each there is nothing that a draft could agree with."""
    nothing = torch.full((k,), -1)
    return Answers(
        prompt_lengths=[text.prompt for text in texts],
        written=[len(text.tokens) - text.prompt for text in texts],
        texts=[torch.cat([text.tokens, nothing]) for text in texts],
        beyond=k,
    )
