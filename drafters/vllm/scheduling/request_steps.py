"""The steps of a request that is captured, and how they travel to the gateway."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

EVERY = 16  # steps that are sent together: sending them one by one would cost each step


class RequestSteps:
    """Steps of one request that have not been sent: draft tokens of the head, and how many drafts
    were accepted.

    A step in which another source drafted has 0 of the head's. Together with the target's own token
    a step makes one token more than it accepts, so that the steps tell where a draft failed.

    They travel in the two lists of vLLM's RequestSpecDecodeMetrics, which vLLM leaves empty at the
    level "summary" (as RequestSourceCounts do, of a request that asked for these).
    """

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """Add the step that has ended."""
        self._drafted.append(drafted)
        self._accepted.append(accepted)

    def sent_with(
        self, counts: RequestSpecDecodeMetrics | None, finished: bool
    ) -> RequestSpecDecodeMetrics | None:
        """What an output has instead of `counts`: these with the steps, if it is time to send them.

        Steps without counts have an empty histogram.
        """
        if counts is None and not finished and len(self._drafted) < EVERY:
            return None
        if counts is None:
            counts = RequestSpecDecodeMetrics(0)
        steps = {"per_step_drafted": self._drafted, "per_step_accepted": self._accepted}
        self._drafted, self._accepted = [], []
        return replace(counts, histogram=list(counts.histogram), **steps)
