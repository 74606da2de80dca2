"""What a gateway with `--learn` writes of its traffic, which head drafts, and what it survives. The
last test ends the gateway."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from app.admission import key_file
from app.settings import REPOSITORY, load
from drafters.learning import captured, load_signal
from drafters.learning.captured import Captured
from drafters.learning.lineage import KEPT, REFUSED, Lineage
from tests.drafters.noised_head import noised
from tests.waiting import until

from .bodies import greedy
from .gateway import Gateway
from .wire import JSON, assert_error, metric

TARGET = REPOSITORY / "models" / "embedded" / "target"
HEAD = Path(str(load({}, {}, preset="embedded").speculation.drafter))
COUNTED = "aerie_learning_captured_sequences_total"
TENANTS: dict[str, dict[str, object]] = {"search": {}, "mail": {}, "law": {"learn": False}}
PATH = "/v1/speculation"
STREAMS = 16
SWAPS = (0, 1, 0, 1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Served:
    """A gateway that captures, and its tenants' clients."""

    def __init__(self, gateway: Gateway, folder: Path, keys: dict[str, str]) -> None:
        self.gateway, self.folder = gateway, folder
        self.clients = {
            tenant: httpx.Client(
                base_url=gateway.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
                trust_env=False,
            )
            for tenant, key in keys.items()
        }

    def complete(self, tenant: str, **changes: Any) -> dict[str, Any]:
        answer = self.clients[tenant].post("/v1/completions", json=greedy(**changes))
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def sequences(self) -> list[Captured]:
        return list(captured.read(self.folder / captured.FOLDER))

    def wait_for(self, count: float) -> None:
        """Until so many sequences were written."""
        until(lambda: self.count >= count)

    @property
    def count(self) -> float:
        return metric(self.clients["search"], COUNTED)


def launch(tmp_path: Path, folder: Path) -> Served:
    keys = {}
    for tenant, limits in TENANTS.items():
        file, now = tmp_path / "keys.toml", datetime.now(UTC)
        _, keys[tenant] = key_file.create(file, tenant, limits, admin=True, now=now)
    options = ["--learn", str(folder), "--no-learn-train", "--learn-exclude", "mail"]
    options += ["--keys-file", str(file), "--enforce-eager"]
    gateway = Gateway.launch(tmp_path / "gateway.log", options)
    try:
        return Served(gateway.wait_ready(), folder, keys)
    except BaseException:
        gateway.kill()
        raise


def add_generations(folder: Path) -> None:
    """Generation 1, a noised head, and generation 2, whose weights are gone."""
    lineage = Lineage(folder)
    for verdict in (KEPT, REFUSED):
        lineage.add(noised(HEAD, folder / "new", 0.4), {"verdict": verdict, "parent": 0})


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With two generations of the head, of which none is in force."""
    place = tmp_path_factory.mktemp("learning")
    folder = place / "learn"
    folder.mkdir(mode=0o700)
    add_generations(folder)
    made = launch(place, folder)
    yield made
    made.gateway.kill()


def steps_fit(sequence: Captured) -> bool:
    """Whether the steps make the answer, but for what the last one made beyond its end."""
    made = sum(1 + accepted for _, accepted in sequence.steps)
    last = sequence.steps[-1][1] if sequence.steps else 0
    return 0 <= made - len(sequence.answer) <= last


def test_what_was_served_can_be_read_back(learning: Served) -> None:
    before = learning.count
    learning.clients["search"].patch(PATH, json={"objective": "fixed", "k": 5})
    answer = learning.complete("search", max_tokens=100, prompt="class Reader:", n=2)
    assert "per_step_drafted" not in str(answer)
    learning.wait_for(before + 2)
    *_, first, second = learning.sequences()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for sequence, choice in zip((first, second), answer["choices"], strict=True):
        assert tokenizer.decode(list(sequence.prompt)) == "class Reader:"
        assert tokenizer.decode(list(sequence.answer)) == choice["text"]
        assert (sequence.tenant, sequence.generation) == ("search", 0)
        assert abs(sequence.at - time.time()) < 60
        assert steps_fit(sequence)
        drafted, accepted = map(sum, zip(*sequence.steps, strict=True))
        assert drafted > accepted > 0


def test_stop_strings_token_reports_and_streams_have_steps_too(learning: Served) -> None:
    before = learning.count
    prompts = ["import os\n", "def area(width", "for name in"]
    answers = [learning.complete("search", max_tokens=60, prompt=prompt) for prompt in prompts]
    text = answers[1]["choices"][0]["text"]
    stop = next(
        text[at : at + 9] for at in range(100, len(text)) if text.find(text[at : at + 9]) == at
    )
    stopped = learning.complete("search", max_tokens=60, prompt=prompts[1], stop=[stop])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    learning.complete("search", max_tokens=60, prompt=prompts[1], speculation={"tokens": True})
    learning.wait_for(before + 5)
    found = learning.sequences()[-5:]
    assert all(steps_fit(sequence) for sequence in found)
    assert all(sum(drafted for drafted, _ in sequence.steps) for sequence in found)


def test_who_is_excluded_and_what_is_short_is_not_written(learning: Served) -> None:
    before = learning.count
    for tenant in ("mail", "law"):
        learning.complete(tenant, max_tokens=40)
    learning.complete("search", max_tokens=15)
    learning.complete("search", max_tokens=20, use_beam_search=True, n=2)
    learning.complete("search", max_tokens=40, prompt="The last one")
    learning.wait_for(before + 1)
    assert learning.count == before + 1
    assert Counter(sequence.tenant for sequence in learning.sequences()).keys() == {"search"}
    names = [file.name for file in (learning.folder / captured.FOLDER).iterdir()]
    assert all(name.endswith("-search.jsonl") for name in names)
    modes = {path.stat().st_mode & 0o777 for path in (learning.folder / captured.FOLDER).iterdir()}
    assert modes == {0o600}


def test_a_client_that_leaves_is_captured_as_far_as_it_got(learning: Served) -> None:
    before = learning.count
    body = greedy("def left(", max_tokens=1500, stream=True)
    with learning.clients["search"].stream("POST", "/v1/completions", json=body) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number > 80:
                break
    learning.wait_for(before + 1)
    sequence = learning.sequences()[-1]
    assert 16 <= len(sequence.answer) < 1500
    assert sum(1 + accepted for _, accepted in sequence.steps) <= len(sequence.answer)


def test_the_load_is_told_while_requests_run(learning: Served) -> None:
    def requests() -> int:
        load = load_signal.read(learning.folder)
        assert load is not None
        assert time.monotonic() - load.at < 5
        return load.requests

    until(lambda: requests() == 0)
    running = threading.Thread(
        target=learning.complete, args=("mail",), kwargs={"max_tokens": 1000}
    )
    running.start()
    until(lambda: requests() == 1)
    running.join()
    until(lambda: requests() == 0)


@pytest.fixture
def client(learning: Served) -> Iterator[httpx.Client]:
    """With fixed K, of a tenant of whose answers nothing is captured."""
    client = learning.clients["mail"]
    client.patch(PATH, json={"objective": "fixed", "k": 4}).raise_for_status()
    yield client
    client.patch(PATH, json={"generation": "auto"}).raise_for_status()


def head(client: httpx.Client) -> JSON:
    found: JSON = client.get(PATH).json()["head"]
    return found


def text(client: httpx.Client, number: int) -> str:
    body = greedy(f"Write a story about {number} birds and a river.", max_tokens=200)
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def texts(client: httpx.Client, meanwhile: Any = None) -> list[str]:
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(text, client, number) for number in range(STREAMS)]
        if meanwhile is not None:
            meanwhile()
        return [one.result() for one in running]


def test_a_pin_under_running_streams_changes_no_text(client: httpx.Client) -> None:
    before = texts(client)
    seen = []

    def swap() -> None:
        for number in SWAPS:
            state = client.patch(PATH, json={"generation": number})
            state.raise_for_status()
            seen.append(state.json()["head"]["generation"])

    assert texts(client, swap) == before
    assert seen == list(SWAPS)


def test_whoever_looks_sees_which_head_drafts(client: httpx.Client) -> None:
    assert head(client) == {
        "generation": 0, "pinned": None, "learned": False, "trial": None, "problem": None,
    }  # fmt: skip
    client.patch(PATH, json={"generation": 1}).raise_for_status()
    text(client, 1)
    client.get(PATH).raise_for_status()
    assert head(client) | {"problem": None} == {
        "generation": 1, "pinned": 1, "learned": True, "trial": None, "problem": None,
    }  # fmt: skip
    assert metric(client, "aerie_head_generation") == 1.0
    assert metric(client, "aerie_head_drafts_verified_total") > 0
    assert metric(client, "aerie_head_swaps_total") > 0
    assert metric(client, "aerie_head_swap_seconds_count") > 0
    shown = client.get("/page/figures").json()["head"]
    assert shown["generation"] == 1
    assert {row["generation"] for row in shown["drafts"]} >= {0, 1}


@pytest.mark.parametrize("value", [2, 7, -1, "1", "newest", 1.5, True, None, [1]])
def test_other_values_are_refused_and_change_nothing(client: httpx.Client, value: Any) -> None:
    assert_error(client.patch(PATH, json={"generation": value}), 400, param="generation")
    assert head(client)["generation"] == 0


def test_a_generation_is_chosen_by_itself(client: httpx.Client) -> None:
    both = {"generation": 1, "objective": "off"}
    assert_error(client.patch(PATH, json=both), 400, param="generation")
    assert head(client)["pinned"] is None
    assert client.get(PATH).json()["objective"] == "fixed"


def test_after_a_kill_the_next_gateway_goes_on(learning: Served, tmp_path: Path) -> None:
    before = learning.count
    learning.complete("search", max_tokens=16)
    learning.wait_for(before + 1)
    learning.gateway.signal(signal.SIGKILL)
    learning.gateway.wait_exit(30)
    assert learning.gateway.leftovers() == []
    whole = len(learning.sequences())
    assert whole >= before + 1
    following = launch(tmp_path, learning.folder)
    try:
        following.complete("search", max_tokens=16)
        following.wait_for(1)
        assert len(following.sequences()) == whole + 1
        assert following.gateway.stop() == 0, following.gateway.tail()
        assert following.gateway.leftovers() == []
    finally:
        following.gateway.kill()
