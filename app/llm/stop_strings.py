"""How much of a stream is held back as the possible beginning of a stop string. No vllm import."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# Stop strings whose borders are remembered: those of a request's choices are the same.
REMEMBERED_STOPS = 128


class Beginnings:
    """How much of a growing text may become one of some stop strings with what follows.

    Each character is looked at once, by Knuth, Morris and Pratt's search: comparing the last 1,023
    characters anew, at each token and with each stop string, took 4 ms of the event loop.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(map(borders, self._stops))
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._read = 0

    def held_back(self, text: str) -> int:
        """How many characters at the end of the text may become a stop string. The text continues
        the one of the last call."""
        new = text[self._read :]
        self._read = len(text)
        return self.held_back_after(new)

    def held_back_after(self, new: str) -> int:
        """As `held_back`, given what has been added to the text since the last call."""
        for index, stop in enumerate(self._stops):
            self._matched[index] = _advanced(stop, self._borders[index], self._matched[index], new)
        return max(self._matched, default=0)


def _advanced(stop: str, borders: Sequence[int], matched: int, new: str) -> int:
    """How many characters of the stop string, not all of them, a text ends with, whose end had
    `matched` of them before `new` came."""
    for character in new:
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        if stop[matched] == character:
            matched += 1
        if matched == len(stop):  # the whole stop string: vLLM ends at it, or goes on (min_tokens)
            matched = borders[matched - 1]
    return matched


@lru_cache(REMEMBERED_STOPS)
def borders(stop: str) -> Sequence[int]:
    """For each beginning of the text, by its length less one: the length of the longest shorter
    text that it both begins and ends with."""
    found = array("H" if len(stop) < 65536 else "L", [0])
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        if stop[length] == character:
            length += 1
        found.append(length)
    return found


def hold_back_beginnings_only(detokenizer: Any) -> None:
    """Make a detokenizer of vLLM (vllm/v1/engine/detokenizer.py) hold back only what may be the
    beginning of a stop string.

    vLLM always holds back as many characters as the longest stop string has, less one: a stream
    then runs behind, and its pieces begin and end in the middle of words.
    """
    if not getattr(detokenizer, "stop_buffer_length", 0):
        return  # no stop strings, or they are part of the output
    take = detokenizer.get_next_output_text
    beginnings = Beginnings(detokenizer.stop)

    def get_next_output_text(finished: bool, delta: bool) -> str:
        if not finished:  # otherwise vLLM holds nothing back
            detokenizer.stop_buffer_length = beginnings.held_back(detokenizer.output_text)
        text: str = take(finished, delta)
        return text

    detokenizer.get_next_output_text = get_next_output_text
