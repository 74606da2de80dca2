"""How many sequences may run and requests may wait, and which requests the engine has begun."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from app.admission.controller import AdmissionController
from app.admission.queue import Slot
from app.admission.tenants import Tenant
from app.engine.configuration.capacity import server_defaults, step_shape
from app.errors import ApiError
from app.llm.engine_load import EngineLoad
from app.settings import load as load_settings


def controller(**given: str) -> AdmissionController:
    return AdmissionController(load_settings(given, {}), EngineLoad(capacity=32))


def test_the_queue_is_as_long_as_the_engine_is_wide_and_an_eighth_of_that_in_an_overload() -> None:
    queue = controller().queue
    assert (queue.slots(), queue.max_waiting(False), queue.max_waiting(True)) == (36, 36, 5)


def test_a_queue_that_the_operator_has_set_stays_as_it_is() -> None:
    queue = controller(max_running="4", max_waiting="7").queue
    assert (queue.slots(), queue.max_waiting(False), queue.max_waiting(True)) == (4, 7, 7)


def test_there_are_connections_for_all_that_the_largest_default_batch_and_its_queue_hold() -> None:
    shape = step_shape({"performance_mode": "throughput"}, server_defaults(160), 0, None)
    settings = load_settings({}, {})
    queue = AdmissionController(settings, EngineLoad(capacity=shape.sequences)).queue
    assert settings.server.max_connections >= queue.slots() + queue.max_waiting(False)


@dataclass(eq=False)
class Request:
    """A request as the controller sees it."""

    slot: Slot
    in_engine: tuple[int, int]

    def end(self, error: ApiError) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize(
    "before",
    [
        [],
        [(1, (1, 0))],  # decodes
        [(1, (0, 0))],  # the engine is done with it, its reader is not
        [(4, (1, 0))],  # three of its four choices have ended
        [(4, (1, 1))],  # and one has not begun
    ],
)
def test_a_prompt_that_is_being_read_does_not_wait_and_those_behind_it_do(
    before: list[tuple[int, tuple[int, int]]],
) -> None:
    """The fault: slots counted for sequences, so that of a request with some that had ended too
    many seemed to run, and the prompt that was being read was ended with queue_timeout."""
    admission, tenant = controller(), Tenant(name="a")
    slots = []
    for sequences, in_engine in [*before, (1, (0, 1)), (1, (0, 1))]:
        slots.append(Slot(tenant, sequences, 0.0, len(slots)))
        admission.open_requests.add(Request(slots[-1], in_engine))
    running = sum(sum(in_engine) for _, in_engine in before) + 1
    assert isinstance(admission.load, EngineLoad)
    admission.load.update(0, running=running, queued=1, deferred=0, kv_usage=0.5)
    *_, is_read, waits = slots
    assert not admission.may_wait(is_read)
    assert admission.may_wait(waits)


KEYS = """
[tenants.search]
[tenants.mail]
[tenants.law]
learn = false
[[keys]]
id = "1"
tenant = "search"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
"""


@pytest.mark.parametrize(
    ("given", "tenant", "captured_as"),
    [
        ({"keys": KEYS}, "search", None),  # nothing is captured by default
        ({"keys": KEYS, "learn": "d"}, "search", "search"),
        ({"keys": KEYS, "learn": "d"}, "law", None),
        ({"keys": KEYS, "learn": "d", "learn_exclude": "mail,x"}, "mail", None),
        ({"keys": KEYS, "learn": "d", "learn_exclude": "Search"}, "search", "search"),
        ({"learn": "d"}, "anonymous", ""),
        ({"learn": "d", "learn_exclude": "anonymous"}, "anonymous", None),
    ],
)
def test_as_whom_a_tenants_sequences_are_captured(
    given: dict[str, str], tenant: str, captured_as: str | None
) -> None:
    admission = controller(**given)
    known = admission.keys.ring.tenants.get(tenant, Tenant(name=tenant))
    assert admission.captured_as(known) == captured_as


def test_who_shows_no_key_on_a_public_path_can_be_excluded() -> None:
    public = controller(keys=KEYS, learn="d").public_identity.tenant
    assert controller(keys=KEYS, learn="d").captured_as(public) == "(anonymous)"
    assert controller(keys=KEYS, learn="d", learn_exclude="(anonymous)").captured_as(public) is None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"keys": KEYS, "learn": "d", "learn_exclude": "mail,x"}, {"law", "mail", "x"}),
        ({"learn": "d", "learn_exclude": "anonymous"}, {"anonymous", ""}),
        ({"learn": "d", "learn_exclude": "search"}, {"search"}),  # from when there were keys
        ({"learn": "d"}, set()),
    ],
)
def test_what_was_captured_of_excluded_tenants_has_their_names(
    given: dict[str, str], names: set[str]
) -> None:
    assert controller(**given).excluded_from_capture() == names
