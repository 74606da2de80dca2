"""Which tokens a head may draft, chosen anew for the texts that it is trained further on.

A draft vocabulary leaves out what was rare where the head was made. In another domain some of that
is common, and a token that a head may not draft is never accepted, however long it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from drafters.train.data.token_sequences import Text

_LEAST_ANSWERS = 2  # captured answers that have a token before it is drafted
_MOST_CHANGED = 1 / 8  # of a draft vocabulary, in a round
_TIMES_AS_COMMON = 2  # as the token whose place it takes: or they would come and go in each round


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """Target ids that come into a draft vocabulary, and as many that leave it; both ascending."""

    added: list[int]
    dropped: list[int]


def vocabulary_change(
    drafted: torch.Tensor, captured: Sequence[Text], mix: Iterable[Text], always: Iterable[int]
) -> VocabularyChange:
    """The commoner tokens for the rarer ones, by how often captured answers and those of the mix
    have them. `drafted` says which target ids the head may draft, bool [vocabulary]; the ids in
    `always` stay. Of equally rare ones the higher ids leave, which tokenizers made last."""
    counts = torch.zeros(len(drafted), dtype=torch.int64)
    answers = torch.zeros_like(counts)  # captured ones that have the token
    for text in captured:
        written = text.tokens[text.prompt :]
        counts += torch.bincount(written, minlength=len(counts))
        answers[written.unique()] += 1
    for text in mix:
        counts += torch.bincount(text.tokens[text.prompt :], minlength=len(counts))
    kept = torch.zeros_like(drafted)
    kept[list(always)] = True
    new = (~drafted & (answers >= _LEAST_ANSWERS)).nonzero()[:, 0]
    old = (drafted & ~kept).nonzero()[:, 0].flip(0)
    new = new[counts[new].argsort(descending=True, stable=True)]
    old = old[counts[old].argsort(stable=True)]
    most = min(len(new), len(old), int(_MOST_CHANGED * int(drafted.sum())))
    new, old = new[:most], old[:most]
    # Counts of `new` fall and those of `old` rise, so that these are the first ones.
    better = counts[new] >= _TIMES_AS_COMMON * counts[old]
    return VocabularyChange(sorted(new[better].tolist()), sorted(old[better].tolist()))
