"""Lookups for the requests of vLLM's V1 model runner, in the step in which their tokens are made.

The worker alone knows a step's tokens before the head's pass runs, and so whether it need run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drafters.control.policy import Match
from drafters.control.sources.draft_plan import Candidate
from drafters.lookup.request_lookup import RequestLookup
from drafters.vllm.scheduling.limits import draft_limit

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Request:
    """What is kept of a request from step to step."""

    limit: int  # its largest number of draft tokens
    candidate: Candidate
    lookup: RequestLookup | None = None  # once its prompt has been read


class LookupProposer:
    """What vLLM makes as the drafter of an engine without a head (LOOKUP_DRAFTER). The runner looks
    up itself (runner.py, V1DraftingRunner), since only it knows the plan of a step."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def load_model(self, target: Any) -> None:
        """There is no model to load."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Raise RuntimeError: vLLM's own runner has no plan."""
        raise RuntimeError("lookups need this project's worker (drafters/vllm/worker.py)")


class LookupDrafter:
    """The texts of the requests that may have drafts, each indexed for itself."""

    def __init__(self, runner: Any, most: int) -> None:
        """`most` is the most draft tokens of a lookup."""
        self._runner = runner
        self._most = most
        self._requests: dict[str, _Request] = {}
        self.matches: tuple[Match, ...] = ()  # that the tokens of the last step settled

    def sync_requests(self, scheduled: Any) -> None:
        """Forget the requests that a SchedulerOutput says have ended or are preempted."""
        for name in (*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())):
            self._requests.pop(name, None)

    def candidates(self, tokens_made: Ints, unread: Ints | None) -> list[Candidate]:
        """Append a step's tokens to the texts, and say what may be drafted for: a candidate for
        each row of the batch. A request in its prompt, and one that may have no drafts, has a limit
        of 0. `tokens_made`, [requests, longest], has -1 behind a request's last token; `unread` is
        how many tokens of each request the head has missed, None without a head."""
        batch = self._runner.input_batch
        in_prompt = self._runner.discard_request_mask.np[: batch.num_reqs].tolist()
        counts = (tokens_made >= 0).sum(1).tolist()
        made = tokens_made.tolist()
        missed = [0] * len(made) if unread is None else unread.tolist()
        longest = int(self._runner.max_model_len)
        found, matches = [], list[Match]()
        for row, name in enumerate(batch.req_ids):
            kept = self._requests.get(name)
            if kept is None:
                kept = self._requests[name] = self._begin(name)
            candidate = kept.candidate
            candidate.limit = 0
            candidate.match = 0
            candidate.unread = missed[row]
            found.append(candidate)
            if not kept.limit or in_prompt[row]:
                continue
            lookup, match = self._advance(kept, row, made[row][: counts[row]])
            if match is not None:
                matches.append(match)
            candidate.limit = max(0, min(kept.limit, longest - len(lookup)))
            if lookup.match is not None:
                candidate.match = lookup.match.length
        self.matches = tuple(matches)
        return found

    def draft(self, request: str, count: int) -> list[int]:
        """`count` draft tokens of a request that has a match."""
        lookup = self._requests[request].lookup
        assert lookup is not None
        return lookup.draft(count)

    def _begin(self, name: str) -> _Request:
        params = self._runner.requests[name].sampling_params
        return _Request(draft_limit(params, self._runner.num_spec_tokens), Candidate(0))

    def _advance(
        self, kept: _Request, row: int, made: list[int]
    ) -> tuple[RequestLookup, Match | None]:
        """Append the tokens `made` in this step, and those of steps in which nothing was looked up.
        A text that is not the beginning of the request's is indexed anew."""
        batch, lookup = self._runner.input_batch, kept.lookup
        known = int(batch.num_tokens_no_spec[row])  # tokens before this step's
        tokens = batch.token_ids_cpu[row]
        have = 0 if lookup is None else len(lookup)
        if lookup is None or have > known or lookup.newest != tokens[have - 1]:
            text = np.concatenate([tokens[:known], np.array(made, np.int32)])
            kept.lookup = RequestLookup(text, self._most)
            return kept.lookup, None
        return lookup, lookup.advance([*tokens[have:known].tolist(), *made])
