"""`aerie bench capture`: what it costs to capture sequences, on the event loop and in the thread.

    aerie bench capture

Prints a JSON line for each length of prompt and answer, with the medians of microseconds:

    loop_us         of the event loop, for each sequence: taking it and handing it over
    step_us         of the event loop, for each output of the engine core, steps included
    engine_us       of the engine core, for each request and step
    write_us        of the thread, for each sequence
    captured_per_s  sequences that the thread writes in its share of the time

and for how long the event loop was kept waiting while the thread wrote as many as it may, against
a thread that has nothing to write (milliseconds, of 2000 waits of 1 ms).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from app.learning.capture import SHARE, Capture
from app.learning.captured_files import CapturedFiles
from app.llm.captured_sequences import captured_from, follow, take_steps
from bench.errors import reports_errors
from bench.parser import command_parser
from drafters.learning.captured import Captured
from drafters.vllm.scheduling.request_steps import EVERY, RequestSteps

LENGTHS = ((128, 128), (1024, 512), (32_768, 1024), (131_072, 1024))  # tokens: prompt, answer
ROUNDS = 400
WAITS = 2000


def microseconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times) * 1e6


def sequence_of(prompt: int, answer: int) -> Any:
    """What is read of a vLLM RequestState, followed, with half of its drafts accepted."""
    sequence = SimpleNamespace(
        prompt_token_ids=[1000 + token for token in range(prompt)],
        detokenizer=SimpleNamespace(
            num_output_tokens=lambda: answer,
            output_token_ids=[1000 + token for token in range(answer)],
        ),
    )
    params = SimpleNamespace(extra_args=None)
    nothing = {"prompt_embeds": None, "mm_features": None, "lora_request": None}
    request = SimpleNamespace(prompt_token_ids=[1], sampling_params=params, resumable=False)
    vars(request).update(nothing)
    follow(request, sequence)
    sequence.aerie_captured_steps += [(5, 2)] * (answer // 3)
    return sequence


def costs(prompt: int, answer: int, folder: Path) -> dict[str, float]:
    """The figures of a length."""
    sequence = sequence_of(prompt, answer)
    capture = Capture(CapturedFiles(folder, 2**28, 1e9))

    def hand_over() -> Captured:
        captured = captured_from(sequence, "", 0)
        assert captured is not None
        capture.offer(captured)
        return capture._take()

    captured = hand_over()
    write_us = microseconds(lambda: capture._files.append("", captured.line()), ROUNDS // 4)
    return {
        "prompt": prompt,
        "answer": answer,
        "loop_us": round(microseconds(hand_over), 2),
        "write_us": round(write_us, 1),
        "captured_per_s": round(SHARE * 1e6 / write_us),
    }


def step_costs() -> dict[str, float]:
    """Microseconds of a step for each request: in the engine core, and of the event loop."""
    steps, sequences, sent = RequestSteps(), {"r": sequence_of(1, 16)}, []

    def engine() -> None:
        for _ in range(EVERY):
            steps.add(5, 2)
            sent.append(steps.sent_with(None, False))

    engine_us = microseconds(engine) / EVERY
    plain = [SimpleNamespace(request_id="r", spec_decode_metrics=None) for _ in range(EVERY - 1)]

    def loop() -> None:
        counts = SimpleNamespace(
            histogram=[], per_step_drafted=[5] * EVERY, per_step_accepted=[2] * EVERY
        )
        take_steps([*plain, SimpleNamespace(request_id="r", spec_decode_metrics=counts)], sequences)

    return {"engine_us": round(engine_us, 2), "step_us": round(microseconds(loop) / EVERY, 2)}


async def lateness(sequence: Captured | None, folder: Path) -> list[float]:
    """Milliseconds that waits of 1 ms took too long, while sequences are captured."""
    capture = Capture(CapturedFiles(folder, 2**28, 1e9))
    capture.start()
    late = []
    for _ in range(WAITS):
        if sequence is not None:
            capture.offer(sequence)
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - began - 0.001) * 1e3)
    await asyncio.to_thread(capture.close)
    return sorted(late)


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Run it; returns the exit code."""
    command_parser("capture", __doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        for prompt, answer in LENGTHS:
            print(json.dumps(costs(prompt, answer, Path(name)) | step_costs()), flush=True)
        for prompt, answer in ((0, 0), *LENGTHS):
            sequence = captured_from(sequence_of(prompt, answer), "", 0) if answer else None
            late = asyncio.run(lateness(sequence, Path(name)))
            quantiles = {f"p{q}": round(late[q * WAITS // 100], 3) for q in (50, 90, 99)}
            line = {"prompt": prompt, "answer": answer, "late_ms": quantiles | {"max": late[-1]}}
            print(json.dumps(line), flush=True)
    return 0
