"""The client, closed and open loops, and counters, against a server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.load.arrivals import closed_loop, open_loop, poisson
from bench.load.client import Client, Job
from bench.load.counters import Counters, speculation
from bench.load.events import Outcome
from bench.load.figures import figures, steady_arrivals
from bench.load.null_server import Script
from bench.load.run import measure
from bench.sweep.fleet import Fleet
from bench.systems.method import parse
from tests.http_server import Handler, serving
from tests.waiting import IN_TIME_S, until

ROOT = Path(__file__).resolve().parents[3]
JOB = Job.of("/v1/completions", {"prompt": "x", "stream": True})


def test_a_run_counts_the_servers_tokens(against: Any) -> None:
    script = Script(chunks=10, tokens=30)
    found = against(script, lambda client: measure(client, [JOB] * 12, limits=[4] * 12))
    assert (found["failed"], found["tokens"], found["chunks"]) == (0, 360, 120)
    assert script.most_running <= 4
    assert "acceptance_length" not in found  # the server has no page of metrics


def test_time_to_first_token_is_the_servers(against: Any) -> None:
    script = Script(chunks=9, tokens=9, first_s=0.2, gap_s=0.05)
    found = against(script, lambda client: measure(client, [JOB] * 2, limits=[2] * 2))
    assert 200 <= found["ttft_ms"]["p50"] < found["e2e_ms"]["p50"]
    assert found["tpot_ms"]["p50"] >= 40  # eight gaps of 50 ms, less one that a read may merge
    assert found["e2e_ms"]["p50"] >= 600


@pytest.mark.parametrize(
    "script", [Script(usage=False), Script(done=False), Script(refuses=("x",))]
)
def test_failures_are_counted_never_raised(against: Any, script: Script) -> None:
    job = Job.of("/v1/completions", {"x": 1})
    found = against(script, lambda client: measure(client, [job] * 3, limits=[1] * 3))
    assert found["failed"] == 3
    assert found["failures"]


async def test_no_server_is_a_failure() -> None:
    async with Client("http://127.0.0.1:9") as client:
        assert "Connect" in (await client.stream(JOB)).failure
        with pytest.raises(RuntimeError, match="/v1/models"):
            await client.json("GET", "/v1/models")


async def test_a_moving_limit_moves_the_load() -> None:
    limits = [1] * 3 + [4] * 8 + [2] * 4
    running, seen = 0, []

    async def send(index: int) -> int:
        nonlocal running
        running += 1
        seen.append((index, running))
        await asyncio.sleep(0.01)
        running -= 1
        return index

    assert await closed_loop(send, limits) == list(range(15))
    assert all(now <= limits[index] for index, now in seen)
    assert max(now for _, now in seen) == 4


def test_an_open_loops_start_and_tail_do_not_count_in_its_steady_tokens() -> None:
    """Catches: 100 requests of 0.4 s in 2 s of arrivals are a sixth too slow."""
    rate, tokens = 50.0, 40

    def answer(sent: float) -> Outcome:
        came = tuple(sent + 0.02 * chunk for chunk in range(21))
        return Outcome(sent, came[0], came[-1], came, came, 7, tokens)

    answers = [answer(index / rate) for index in range(100)]
    found = figures(answers) | steady_arrivals(answers)
    assert found["failed"] == 0
    assert found["steady_tokens_per_second"] == pytest.approx(rate * tokens, rel=0.1)
    assert found["tokens_per_second"] < 0.9 * rate * tokens


def test_requests_that_are_sent_at_times_have_an_open_loops_figures(
    against: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.load.run.steady_arrivals", lambda found: {"answers": len(found)})
    times = [0.0, 0.01, 0.02]
    found = against(Script(), lambda client: measure(client, [JOB] * 3, times=times))
    assert (found["failed"], found["answers"]) == (0, 3)


async def test_the_end_of_an_address_and_a_running_servers_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    class Models(Handler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers["Authorization"]))
            self.answer(200, b'{"data": [{"id": "m"}]}')

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(Models) as url:
        for ending in ("", "/", "/v1", "/v1/"):
            async with Client.of_running_server(url + ending) as client:
                assert await client.models() == ["m"]
        attached = {"x": f"{url}/v1/"}
        methods = parse("other:x")
        async with Fleet(methods, {}, "", Path(), lambda _: None, attached) as fleet:
            await fleet.model_of(methods[0])
    assert seen == [("/v1/models", "Bearer secret")] * 5


def test_a_busy_process_ends_with_a_bench_that_was_ended() -> None:
    """SIGTERM and SIGHUP end a bench without its `finally`."""
    program = (
        "import psutil, time; from bench.load.busy import busy_process\n"
        "with busy_process():\n"
        "    print(psutil.Process().children()[0].pid, flush=True); time.sleep(60)"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert bench.stdout is not None
    busy = psutil.Process(int(bench.stdout.readline()))
    bench.terminate()
    bench.wait()
    bench.stdout.close()
    try:
        until(lambda: _has_ended(busy), 20, "the busy process outlived its bench", 0.1)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            busy.kill()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_poisson_arrivals_have_their_rate_and_their_seed() -> None:
    times = poisson(50.0, 4000, seed=3)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 50.0, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)  # exponential gaps
    assert poisson(50.0, 10, seed=3) == times[:10] != poisson(50.0, 10, seed=4)
    with pytest.raises(ValueError, match="rate"):
        poisson(0.0, 1, seed=0)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Each is answered once all are sent."""
    together = asyncio.Barrier(4)

    async def send(index: int) -> int:
        await together.wait()
        return index

    async with asyncio.timeout(IN_TIME_S):
        assert await open_loop(send, [0.0, 0.01, 0.02, 0.03]) == [0, 1, 2, 3]


VLLM = """\
# HELP vllm:spec_decode_num_drafts_total x
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
"""


def test_acceptance_is_what_the_counters_grew_by() -> None:
    before = Counters.read(VLLM.format(drafts=10, drafted=20, accepted=9, first=6, second=3))
    after = Counters.read(VLLM.format(drafts=20, drafted=40, accepted=24, first=15, second=9))
    assert speculation(after.since(before)) == {
        "acceptance_length": 2.5, "k_mean": 2.0, "acceptance": [0.9, 0.6],
    }  # fmt: skip
    assert speculation(after.since(after)) == {}


def test_positions_that_only_earlier_runs_drafted_are_left_out() -> None:
    page = VLLM + 'aerie_steps_total{{k="1"}} {ones}\naerie_steps_total{{k="2"}} {twos}\n'
    before = page.format(drafts=10, drafted=20, accepted=9, first=6, second=3, ones=0, twos=10)
    after = page.format(drafts=20, drafted=30, accepted=18, first=15, second=3, ones=10, twos=10)
    assert speculation(Counters.read(after).since(Counters.read(before))) == {
        "acceptance_length": 1.9, "k_mean": 1.0, "acceptance": [0.9], "steps": {"1": 10},
    }  # fmt: skip


def test_increases_of_several_starts_add_up_as_json() -> None:
    before = Counters.read(VLLM.format(drafts=10, drafted=20, accepted=9, first=6, second=3))
    after = Counters.read(VLLM.format(drafts=20, drafted=40, accepted=24, first=15, second=9))
    entry = json.loads(json.dumps(after.since(before).entry()))
    assert after.since(after).entry() == {}
    assert Counters.total([entry, {}]).values == after.since(before).values
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert Counters.total([entry, entry]).by(by_position) == {0: 18.0, 1: 12.0}


def test_a_label_that_is_no_number_is_an_error_where_numbers_are_asked_for() -> None:
    page = Counters.read('aerie_steps_total{k="deep"} 3.0\n')
    assert page.labelled("aerie_steps_total") == {"deep": 3.0}
    with pytest.raises(ValueError, match="deep"):
        page.by("aerie_steps_total")


def test_the_gateways_own_counters_know_every_step() -> None:
    page = """\
aerie_steps_total{k="0"} 30.0
aerie_steps_total{k="3"} 10.0
aerie_decode_seconds_total 2.0
aerie_decode_seconds_without_drafts_total 3.0
aerie_step_seconds_total{phase="control"} 0.01
aerie_step_seconds_total{phase="other"} 0.5
aerie_probe_seconds_total 0.02
aerie_k 3.0
"""
    found = speculation(Counters.read(page).since(Counters({})))
    assert found["k_mean"] == 0.75
    assert found["gauge"] == 1.5
    assert found["control"] == 0.015  # probes and decisions, of two seconds
    assert found["steps"] == {"0": 30, "3": 10}


def test_drafts_are_counted_by_source_and_a_lookup_may_be_longer_than_k() -> None:
    """Catches: acceptance cut at the head's K, so that its sum is not the length less 1."""
    page = VLLM + (
        'aerie_steps_total{{k="0"}} {drafts}\n'
        'aerie_source_drafts_verified_total{{source="head"}} 50\n'
        'aerie_source_drafts_accepted_total{{source="head"}} 9\n'
        'aerie_source_drafts_verified_total{{source="lookup"}} {drafted}\n'
        'aerie_source_drafts_accepted_total{{source="lookup"}} {accepted}\n'
    )
    before = page.format(drafts=10, drafted=20, accepted=9, first=6, second=3)
    after = page.format(drafts=20, drafted=40, accepted=24, first=15, second=9)
    found = speculation(Counters.read(after).since(Counters.read(before)))
    assert found["sources"] == {"lookup": {"drafted": 20, "accepted": 15}}
    assert found["acceptance"] == [0.9, 0.6]
    assert (found["acceptance_length"], found["steps"]) == (2.5, {"0": 10})
