"""`aerie bench lookup`: microseconds and bytes of a lookup by length of the request's text.

    aerie bench lookup [--lengths N ...] [--steps N]

The text is Python source in the tokens of the embedded target, held out from its training. A step
appends the tokens that follow and finds the match at the new end, as the worker does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.errors import reports_errors
from bench.parser import command_parser
from drafters.lookup.request_lookup import RequestLookup

LENGTHS = (1024, 8192, 32768)  # tokens
TOKENS_OF_A_STEP, MOST = 3, 10
REQUESTS = 128


def measure(text: npt.NDArray[np.int32], length: int, steps: int) -> dict[str, float]:
    """Time the index of the first `length` tokens of `text`, and `steps` steps behind them."""
    began = time.perf_counter()
    request = RequestLookup(text[:length], MOST)
    build_s = time.perf_counter() - began
    nbytes = request.nbytes
    new = [
        text[length + number * TOKENS_OF_A_STEP :][:TOKENS_OF_A_STEP].tolist()
        for number in range(steps)
    ]
    matches = 0
    began = time.perf_counter()
    for tokens in new:
        request.advance(tokens)
        if request.match is not None:
            matches += 1
            request.draft(MOST)
    step_s = (time.perf_counter() - began) / steps
    return {
        "tokens": length,
        "build_ms": round(1e3 * build_s, 2),
        "step_us": round(1e6 * step_s, 2),
        "matches": round(matches / steps, 2),
        f"mib_of_{REQUESTS}_requests": round(REQUESTS * nbytes / 2**20, 1),
    }


def source(tokens: int) -> npt.NDArray[np.int32]:
    """So many tokens of the held-out source files, from the beginning again if they end."""
    from drafters.train.embedded import EMBEDDED
    from drafters.train.embedded.data import load_corpus
    from drafters.train.embedded.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(EMBEDDED / "target")
    ids: list[int] = []
    for file in sorted(load_corpus().held_out, key=lambda file: file.path):
        ids += tokenizer.encode(file.text).ids
        if len(ids) >= tokens:
            break
    return np.resize(np.array(ids, np.int32), tokens)


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Print a line of JSON for each length; returns the exit code."""
    options = parser().parse_args(argv)
    text = source(max(options.lengths) + options.steps * TOKENS_OF_A_STEP)
    for length in options.lengths:
        print(json.dumps(measure(text, length, options.steps)), flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    made = command_parser("lookup", __doc__ or "")
    add = made.add_argument
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N",
        help=f"tokens of the text [{' '.join(map(str, LENGTHS))}]")  # fmt: skip
    add("--steps", type=int, default=2000, metavar="N", help="steps that are timed [2000]")
    return made
