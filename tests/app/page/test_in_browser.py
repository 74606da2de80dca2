"""The page in a real Chromium, against a gateway whose engine is scripted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="Playwright is not installed")

from playwright.sync_api import expect

from app.admission.key_file import create
from app.engine.heads.generations import HeadGenerations
from tests.waiting import until

from .browser import CHROMIUM, POLLS_MS, Page, axe_findings, browser
from .stand_in import ANSWER, K_MAX, REPEAT, SAY, STEP_S, StandInGateway

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1440, "height": 900}
WALL = {"width": 3840, "height": 2160}
SCHEMES = ("light", "dark")
OFTEN_MS = 200  # between two polls of the page, of which many tests wait for the next one
A_POLL_MS = OFTEN_MS + 100


@pytest.fixture(scope="module")
def gateway() -> Iterator[StandInGateway]:
    with StandInGateway() as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def page(gateway: StandInGateway, chromium: Any, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A tab of a new browser profile, of which nothing may be heard at the end."""
    options = {"viewport": DESK, "polls_ms": OFTEN_MS, **getattr(request, "param", {})}
    polls_ms = options.pop("polls_ms")
    context = chromium.new_context(**options)
    context.set_default_timeout(15_000)
    tab = Page(context, gateway.url, polls_ms)
    yield tab
    context.close()
    assert not tab.problems


def grown(http: httpx.Client, before: list[float] | None = None) -> list[float]:
    """Each of COUNTERS, or by how much it has grown. Engines that ended before are counted too."""
    lines = http.get("/metrics").text.splitlines()
    now = [
        sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in COUNTERS
    ]
    return now if before is None else [new - old for new, old in zip(now, before, strict=True)]


def test_the_first_visit(page: Page) -> None:
    """Light, with few requests, and fast on loopback."""
    loaded: list[Any] = []
    page.tab.on("response", lambda response: loaded.append(response))
    with page.tab.expect_response("**/page/icon.svg"):  # asked for last
        page.tab.goto(page.url)
    page.tab.locator(".welcome").wait_for()
    files = [one for one in loaded if "/page/figures" not in one.url]
    assert sorted(one.url.removeprefix(page.url) for one in files) == [
        *("/", "/page/app.css", "/page/app.js", "/page/icon.svg"),
    ]
    assert sum(len(one.body()) for one in files) < 300_000
    timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    took = [page.tab.evaluate(timing)]
    for _ in range(2):
        page.tab.reload()
        took.append(page.tab.evaluate(timing))
    assert 0 < min(took) < 1000
    page.tab.locator(".status .words", has_text="Ready").wait_for()
    assert page.tab.locator(".model").inner_text() == "aerie-embedded"


def test_an_answers_tokens_are_those_that_the_engine_counted(page: Page) -> None:
    page.open()
    with httpx.Client(base_url=page.url) as http:
        before = grown(http)
        answer = page.ask("Is it a palindrome?").answered()
        drafted, accepted = grown(http, before)
    assert page.figure("drafted") + page.figure("own") == answer.locator(".t").count()
    assert answer.locator(".t.draft").count() == page.figure("drafted") > 0
    beyond = answer.locator("[data-figure=beyond]")
    extra = page.figure("beyond") if beyond.count() else 0
    assert page.figure("drafted") + extra == accepted <= drafted
    assert answer.locator(".tokens").text_content() == ANSWER
    assert page.figure("length") > 1


def test_sources_have_marks_and_counts_of_their_own(page: Page) -> None:
    answer = page.open().ask(f"{REPEAT} this function.").answered()
    for figure, mark in {"drafted": "draft", "lookup": "lookup", "grammar": "grammar"}.items():
        assert answer.locator(f".t.{mark}").count() == page.figure(figure) > 0
    colours = {
        answer.locator(f".t.{mark}").first.evaluate(
            "node => getComputedStyle(node).backgroundColor"
        )
        for mark in ("draft", "lookup", "grammar", "own")
    }
    assert len(colours) == 4
    answer.locator(".t.lookup").first.hover()
    told = r"looked up in the text before, at position \d, and accepted in step \d"
    expect(page.tab.locator(".picked-token").last).to_contain_text(re.compile(told))
    assert not axe_findings(page.tab)


def test_without_a_head_the_page_says_what_drafts(page: Page, gateway: StandInGateway) -> None:
    policy = gateway.engine.policy
    told = page.open().tab.locator(".live", has_text="This model has no draft head")
    assert told.count() == 0
    before, policy.available_sources = policy.available_sources, ["lookup"]
    try:
        told.wait_for()
    finally:
        policy.available_sources = before


def test_a_tokens_place_is_told_on_hover_and_by_keyboard(page: Page) -> None:
    page.open().ask("Is it a palindrome?").answered()
    told = page.tab.locator(".picked-token").last
    page.tab.locator(".answer .t.draft").nth(3).hover()
    expect(told).to_contain_text(re.compile(r"drafted, at position \d, and accepted in step \d+"))
    page.tab.mouse.move(0, 0)
    page.tab.locator(".answer .tokens").focus()
    page.tab.keyboard.press("Home")
    expect(told).to_contain_text("the target’s own, in step 1, which had no drafts")
    page.tab.keyboard.press("ArrowRight")
    expect(told).to_contain_text(f"which had {K_MAX} drafted and 0 accepted")
    page.tab.keyboard.press("ArrowRight")
    expect(told).to_contain_text("drafted, at position 1, and accepted in step 3")
    expect(page.tab.locator(".same-step")).to_have_count(6)


def test_several_turns_and_markdown_with_code_to_copy(page: Page) -> None:
    page.open().ask(f"{SAY} **One** `two`").answered()
    page.tab.get_by_role("button", name="Marks").click()
    answer = page.ask(f"{SAY} ```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    done = answer.answered()
    expect(page.tab.locator(".turn")).to_have_count(2)
    assert page.tab.locator(".prose strong").inner_text() == "One"
    assert done.locator("pre code").inner_text().strip() == "print(1)"
    assert done.locator("td").count() == 2
    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    done.locator(".code button").click()
    assert page.tab.evaluate("navigator.clipboard.readText()").strip() == "print(1)"


def test_what_is_sent_is_what_was_set(page: Page, gateway: StandInGateway) -> None:
    page.open()
    page.tab.get_by_text("Settings").click()
    page.tab.get_by_label("System prompt").fill("Be brief.")
    page.tab.get_by_label("Temperature").fill("0.5")
    page.tab.get_by_label("Most tokens", exact=True).fill("7")
    page.tab.get_by_label("Draft tokens a step").select_option("2")
    page.tab.keyboard.press("Escape")
    with page.tab.expect_request("**/v1/chat/completions") as sent:
        page.ask("Hi")
    body = sent.value.post_data_json
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7)
    assert body["speculation"] == {"tokens": True, "max_k": 2}
    expect(page.answered()).to_contain_text("Cut at the limit of 7 tokens.")


@pytest.mark.parametrize(
    ("temperature", "tokens", "sent_as"), [("0.75", "7", (0.75, 7)), ("1", "1.5", (1, 1))]
)
def test_no_number_keeps_a_message_from_being_sent(
    page: Page, temperature: str, tokens: str, sent_as: tuple[float, int]
) -> None:
    """Catches: a number between two steps of its field, for which the browser sends nothing and
    says nothing, as the field is out of sight; and half a token."""
    page.open()
    page.tab.get_by_text("Settings").click()
    page.tab.get_by_label("Temperature").fill(temperature)
    page.tab.get_by_label("Most tokens", exact=True).fill("")
    page.tab.get_by_label("Most tokens", exact=True).press_sequentially(tokens)
    page.tab.keyboard.press("Escape")
    page.tab.get_by_label("Message").fill("Hi")
    with page.tab.expect_request("**/v1/chat/completions") as sent:
        page.tab.get_by_role("button", name="Send").click()
    body = sent.value.post_data_json
    assert (body["temperature"], body["max_tokens"]) == sent_as
    page.answered()


def test_an_address_that_names_no_view_shows_the_chat(page: Page) -> None:
    """Catches: the name of a property that every object has, for which nothing was shown."""
    page.tab.goto(f"{page.url}/#constructor")
    page.tab.locator(".welcome").wait_for()


def test_stop_and_try_again(page: Page, gateway: StandInGateway) -> None:
    page.open()
    gateway.engine.llm.step_s = 0.5
    try:
        page.ask("Slowly")
        page.tab.locator(".answer .t").nth(2).wait_for()
        page.tab.get_by_role("button", name="Stop").click()
        page.tab.locator(".answer.stopped").wait_for()
        assert page.tab.locator(".answer .t").count() >= 3
    finally:
        gateway.engine.llm.step_s = 0.01
    page.tab.get_by_role("button", name="Try again").click()
    assert page.answered().locator(".tokens").text_content() == ANSWER
    assert page.tab.locator(".turn").count() == 1


def test_the_race(page: Page) -> None:
    """Of a few, as a pause of this machine while one lane runs makes that one the slower."""
    page.open("race")
    for name in ("Start the race", "Race again", "Race again"):
        page.tab.get_by_role("button", name=name).click()
        ratio = page.tab.locator("[data-figure=ratio]").inner_text()
        if float(ratio.removesuffix("×")) > 1.3:
            break
    assert float(ratio.removesuffix("×")) > 1.3
    assert "Both texts are identical" in page.tab.locator(".verdict").inner_text()
    assert page.tab.locator(".lane.without .t.draft").count() == 0
    assert page.tab.locator(".lane.with .t.draft").count() > 0
    speeds = [
        float(one) for one in page.tab.locator("[data-figure=speed]:visible").all_inner_texts()
    ]
    assert speeds[1] > speeds[0] > 0
    page.tab.evaluate("window.at = performance.now(); performance.now = () => window.at")
    page.tab.get_by_role("button", name="Watch both at once").click()
    page.tab.evaluate("window.at += 300")
    shown = [f"document.querySelectorAll('.lane.{lane} .t').length" for lane in ("without", "with")]
    until(lambda: page.tab.evaluate(f"{shown[1]} > {shown[0]}"))  # the faster one is ahead
    page.tab.evaluate("window.at += 1e6")
    for bar in page.tab.locator(".lane .track rect").all():
        expect(bar).to_have_attribute("width", "100")


@pytest.mark.parametrize("page", [{"polls_ms": POLLS_MS}], indirect=True, ids=["as it is"])
def test_a_race_is_no_other_request_of_the_next_one(page: Page) -> None:
    """Catches: figures of a second ago, when the last race ran, that are taken for others'; and
    listeners that each race leaves on the same text."""
    page.open("race")
    tools = page.tab.context.new_cdp_session(page.tab)
    counts = set()
    for name in ("Start the race", "Race again", "Race again"):
        page.tab.get_by_role("button", name=name).click()
        page.tab.locator("[data-figure=ratio]").wait_for()
        assert "Other requests were running" not in page.tab.locator(".verdict").inner_text()
        text = tools.send(
            "Runtime.evaluate", {"expression": "document.querySelector('.lane-text')"}
        )
        lane = {"objectId": text["result"]["objectId"]}
        counts.add(len(tools.send("DOMDebugger.getEventListeners", lane)["listeners"]))
    assert len(counts) == 1


def test_a_race_without_drafts_says_so(page: Page, gateway: StandInGateway) -> None:
    """The fault: it told the ratio of two speeds without drafts as theirs."""
    values = gateway.engine.policy.values
    page.open("race")
    values["k"] = 0
    try:
        page.tab.locator("[data-figure=k]", has_text="0").wait_for()
        page.tab.get_by_role("button", name="Start the race").click()
        page.tab.get_by_text("Nothing was drafted. The policy says “K = 5").wait_for()
        assert page.tab.locator("[data-figure=ratio]").count() == 0
    finally:
        values["k"] = K_MAX


def test_a_race_says_that_others_ran_meanwhile(page: Page, gateway: StandInGateway) -> None:
    """The fault: it looked once, when the race began."""
    page.open("race")
    gateway.engine.llm.step_s = 0.3  # until the page has seen the others
    try:
        page.tab.get_by_role("button", name="Start the race").click()
        page.tab.locator(".lane.without .t").first.wait_for()
        with other_figures(page, lambda figures: figures["counters"].update(running=2)):
            page.tab.locator(".line-key", has_text="Running requests 2").wait_for()
            gateway.engine.llm.step_s = STEP_S
            page.tab.get_by_text("Other requests were running").wait_for()
    finally:
        gateway.engine.llm.step_s = STEP_S


@contextmanager
def other_figures(page: Page, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """The page gets figures of which something is changed."""

    def answer(route: Any) -> None:
        figures = route.fetch().json()
        change(figures)
        route.fulfill(json=figures)

    page.tab.route("**/page/figures", answer)
    try:
        yield
    finally:
        page.tab.unroute("**/page/figures")


def reason(page: Page, *chunks: dict[str, Any]) -> None:
    """Answer each chat with chunks of these choices, as a server with a reasoning parser does."""
    lines = [json.dumps({"id": "x", "choices": [{"index": 0} | chunk]}) for chunk in chunks]
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    page.tab.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def test_reasoning_is_shown_above_the_answer(page: Page) -> None:
    page.open()
    told = {"tokens": [{"text": "Hm", "step": 0, "origin": "target"}], "steps": []}
    reason(page, {"delta": {"reasoning": "Hm"}}, {"delta": {"content": "Four."}})
    answer = page.ask("2 + 2?").answered()
    assert answer.locator(".reasoning").inner_text() == "Hm"
    assert answer.locator(".prose").inner_text() == "Four."
    assert not axe_findings(page.tab)
    reason(page, {"delta": {"reasoning": "Hm"}, "speculation": told, "finish_reason": "length"})
    answer = page.ask("2 + 3?").answered()
    assert answer.locator(".t").inner_text() == "Hm"
    assert answer.locator(".reasoning").count() == 0, "the marks show it"
    page.tab.get_by_role("button", name="Marks").click()
    assert answer.locator(".reasoning").inner_text() == "Hm"


def test_the_race_compares_reasoning_too(page: Page) -> None:
    """Without token origins and usage no speed is known."""
    page.open("race")
    chunks = iter(["warm", "I think A", "We think A"])

    def answer(route: Any) -> None:
        choice = {"index": 0, "delta": {"reasoning": next(chunks)}}
        body = json.dumps({"id": "x", "choices": [choice]})
        route.fulfill(content_type="text/event-stream", body=f"data: {body}\n\ndata: [DONE]\n\n")

    page.tab.route("**/v1/chat/completions", answer)
    page.tab.evaluate("window.setTimeout = () => 0")  # an ended answer waits for nothing
    page.tab.get_by_role("button", name="Start the race").click()
    page.tab.locator("[data-figure=ratio]").wait_for()
    assert page.tab.locator("[data-figure=ratio]").inner_text() == "–"
    assert "The texts part after 0 characters" in page.tab.locator(".verdict").inner_text()
    assert page.tab.locator(".lane.without .lane-text").inner_text() == "I think A"


def test_k_is_pinned_from_the_page(page: Page) -> None:
    page.open()
    assert page.tab.locator(".why").inner_text().startswith("K = 5:"), "and the reason is told"
    with httpx.Client(base_url=page.url) as http:
        try:
            page.tab.get_by_text("A fixed K").click()
            page.tab.get_by_role("slider", name="K").fill("2")
            page.tab.get_by_role("button", name="Apply").click()
            page.tab.locator("[data-figure=k]", has_text="2").wait_for()
            state = http.get("/v1/speculation").json()
            assert (state["objective"], state["k"]) == ("fixed", 2)
            page.ask("Is it a palindrome?").answered()
            positions = page.tab.locator(".answer .t.p3, .answer .t.p4").count()
            assert positions == 0 < page.figure("drafted")
        finally:
            http.patch("/v1/speculation", json={"objective": "throughput", "k": K_MAX})


def test_an_objective_begins_with_the_figure_in_force(
    page: Page, gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults: the K of when the page was opened, and 50 ms whatever had been asked before."""
    policy = gateway.engine.policy
    monkeypatch.setattr(policy, "values", {"objective": "latency", "k": 0, "tpot_s": 0.02})
    page.open().tab.get_by_label("Milliseconds a token").wait_for()
    policy.values = {"objective": "throughput", "k": 3, "tpot_s": None}
    page.tab.locator("[data-figure=k]", has_text="3").wait_for()
    page.tab.get_by_role("button", name="A fixed K").click()
    slider = page.tab.get_by_role("slider", name="K")
    expect(slider).to_have_value("3")
    assert policy.values["k"] == 3
    page.tab.get_by_role("button", name="Tokens in time").click()
    expect(page.tab.get_by_label("Milliseconds a token")).to_have_value("20")
    assert policy.values["tpot_s"] == 0.02


def test_arrow_keys_change_nothing_before_it_is_applied(
    page: Page, gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = gateway.engine.policy
    monkeypatch.setattr(policy, "values", {"objective": "fixed", "k": 5, "tpot_s": None})
    sent: list[dict[str, Any]] = []

    async def steer(changes: dict[str, Any]) -> dict[str, Any]:
        sent.append(changes)
        policy.values["k"] = 3  # an engine that has no K of 4
        return policy.latest()

    monkeypatch.setattr(policy, "steer", steer)
    slider = page.open().tab.get_by_role("slider", name="K")
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    page.tab.wait_for_timeout(A_POLL_MS)
    slider.press("ArrowRight")
    expect(slider).to_have_value("4")
    assert not sent
    slider.press("Enter")
    expect(slider).to_have_value("3")
    page.tab.get_by_role("button", name="No drafts").focus()
    page.tab.keyboard.press("ArrowUp")
    assert sent == [{"objective": "fixed", "k": 4}]


def test_a_number_can_be_typed_slowly(
    page: Page, gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: with each poll the figure in force took the place of what was typed."""
    policy = gateway.engine.policy
    monkeypatch.setattr(policy, "values", {"objective": "latency", "k": K_MAX, "tpot_s": 0.02})
    page.open()

    def typed(field: Any, begin: str, end: str) -> Any:
        field.press("Control+A")
        field.press("Delete")
        page.tab.wait_for_timeout(A_POLL_MS)
        field.press_sequentially(begin)
        page.tab.wait_for_timeout(A_POLL_MS)
        field.press_sequentially(end)
        return field

    typed(page.tab.get_by_label("Milliseconds a token"), "3", "5").press("Enter")
    page.tab.get_by_text("Settings").click()
    field = typed(page.tab.get_by_label("Temperature"), "0.", "75")
    assert field.input_value() == "0.75"
    until(lambda: policy.values["tpot_s"] == 0.035)


def test_several_gateways_behind_one_address_are_noticed(page: Page) -> None:
    """A gateway that is started again is another one too, and is no such case."""
    told = page.open().tab.get_by_text("Several gateways answer")
    with other_figures(page, lambda figures: figures.update(gateway="another")):
        for _ in range(3):  # by the third, the page has shown the second
            with page.tab.expect_response("**/page/figures"):
                pass
        assert told.count() == 0
    told.wait_for()


def test_k_is_0_while_no_request_may_have_drafts(page: Page, gateway: StandInGateway) -> None:
    """The fault: the page showed the K that requests with drafts would have."""
    policy = gateway.engine.policy
    page.open().tab.locator("[data-figure=k]", has_text=str(K_MAX)).wait_for()
    policy.drafts_off = True
    try:
        page.tab.locator("[data-figure=k]", has_text="0").wait_for()
    finally:
        policy.drafts_off = False


def test_generations_are_compared_by_the_accepted_tokens_of_a_draft(
    page: Page, gateway: StandInGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: of all draft tokens, a better head with a larger K got a smaller share accepted:
    25 of 40, for 16 of 20."""
    engine = gateway.engine
    for generation, drafted, accepted in ((0, (20, 0), (16, 0)), (1, (20, 20), (16, 9))):
        engine.policy.drafts.generation = generation
        totals = {"drafted": drafted, "accepted": accepted}
        engine.policy.drafts.count({"available_sources": ["head"], "totals": totals}, None)
    monkeypatch.setattr(engine, "heads", HeadGenerations(tmp_path, lambda: "head"))
    shown = page.open().tab.locator("[data-figure=generations]")
    assert "tokens of a draft" in shown.locator("figcaption").inner_text()
    assert shown.locator("td").all_inner_texts() == ["0.80", "1.25"]


@contextmanager
def keyed_page(
    chromium: Any, folder: Path, *refusals: int, **limits: int
) -> Iterator[tuple[Page, str]]:
    """A tab on a gateway that asks for a key, and the key of a tenant with these limits. Nothing
    but the refusals may be heard of it at the end."""
    file = folder / "keys.toml"
    _, secret = create(file, "friends", limits, admin=False, now=datetime.now(UTC))
    with StandInGateway(keys_file=str(file)) as running:
        context = chromium.new_context()
        page = Page(context, running.url, OFTEN_MS)
        page.expected = refusals
        yield page, secret
        assert not page.problems
        context.close()


def enter(page: Page, key: str) -> None:
    page.tab.get_by_label("API key").fill(key)
    page.tab.keyboard.press("Enter")


def test_without_a_key_nothing_is_shown(chromium: Any, tmp_path: Path) -> None:
    """It is asked for, kept in the tab alone, and asked for again when it is not known."""
    with keyed_page(chromium, tmp_path, 401, 403) as (page, secret):
        page.tab.goto(page.url)
        page.tab.get_by_label("API key").wait_for()
        assert page.tab.locator(".model").inner_text() == ""
        enter(page, "sk-wrong")
        page.tab.get_by_text("does not know that key").wait_for()
        enter(page, secret)
        page.tab.locator(".status .words", has_text="Ready").wait_for()
        assert page.ask("Hi").answered().locator(".t").count() > 0
        assert page.tab.get_by_role("button", name="No drafts").is_disabled()
        assert page.tab.get_by_text("Only an admin’s key").is_visible()
        page.tab.reload()
        page.tab.locator(".status .words", has_text="Ready").wait_for()
        other = Page(page.tab.context, page.url)
        other.tab.goto(page.url)
        other.tab.get_by_label("API key").wait_for()


def test_a_late_refusal_of_one_key_says_nothing_of_the_next(chromium: Any, tmp_path: Path) -> None:
    with keyed_page(chromium, tmp_path, 401) as (page, secret):
        late: list[Any] = []

        def hold(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer sk-wrong":
                late.append(route)
            else:
                route.continue_()

        page.tab.route("**/page/figures", hold)
        page.tab.goto(page.url)
        enter(page, "sk-wrong")
        page.tab.get_by_role("button", name="Key", exact=True).click()
        enter(page, secret)
        page.tab.locator(".status .words", has_text="Ready").wait_for()
        assert len(late) == 1
        with page.tab.expect_response(lambda it: it.status == 401):
            late.pop().continue_()
        assert page.ask("Hi").answered().locator(".t").count() > 0


def test_an_engine_killed_in_an_answer_and_back(page: Page, gateway: StandInGateway) -> None:
    page.open()
    page.expected = (503,)
    gateway.engine.llm.step_s = 0.5
    page.ask("Slowly")
    page.tab.locator(".answer .t").nth(2).wait_for()
    gateway.engine.kill()
    page.tab.get_by_text("The engine was lost while it answered").wait_for()
    assert page.tab.locator(".answer .t").count() >= 3, "what had come is kept"
    page.tab.get_by_text("is being started again").first.wait_for()
    page.tab.get_by_role("button", name="Try again").click()
    alert = page.tab.locator(".answer .problem")
    alert.get_by_text("The engine was lost and is being started again").wait_for()
    assert re.search(r"Try again in \d+ seconds?\.", alert.inner_text())
    gateway.engine.begin()
    page.tab.locator(".status .words", has_text="Ready").wait_for()
    page.tab.get_by_role("button", name="Try again").click()
    assert page.answered().locator(".tokens").text_content() == ANSWER


def test_a_gateway_that_is_gone_is_named(page: Page) -> None:
    page.open()
    page.expected = (0,)
    page.tab.context.set_offline(True)
    page.tab.locator(".status .words", has_text="cannot be reached").wait_for()
    page.ask("Hi")
    page.tab.get_by_text("The connection to the gateway was lost.").wait_for()
    page.tab.context.set_offline(False)
    page.tab.locator(".status .words", has_text="Ready").wait_for()


def test_a_gateway_that_says_nothing_is_named(page: Page) -> None:
    """The fault: the page said "Ready" over figures that stood still, and never asked again."""
    page.tab.add_init_script(
        "const timeout = AbortSignal.timeout;"
        "AbortSignal.timeout = (ms) => timeout.call(AbortSignal, ms / 20);"
    )
    page.open()
    page.expected = (0,)
    silent = "**/page/figures"
    page.tab.route(silent, lambda route: None)
    page.tab.locator(".status .words", has_text="cannot be reached").wait_for()
    page.tab.unroute(silent)
    page.tab.locator(".status .words", has_text="Ready").wait_for()


def test_a_question_without_an_answer_goes_with_the_next_one(page: Page) -> None:
    """Catches: two messages of the user in a row, which the templates of some models refuse."""
    bodies: list[Any] = []
    page.open()
    page.expected = (0,)
    page.tab.route("**/v1/chat/completions", lambda route: route.abort())
    page.ask("First")
    page.tab.get_by_text("The connection to the gateway was lost.").wait_for()
    page.tab.unroute("**/v1/chat/completions")
    page.tab.on("request", lambda sent: bodies.append(sent.post_data_json))
    page.ask("Second").answered()
    page.ask("Third").answered()
    sent = [body["messages"] for body in bodies if body and "messages" in body]
    assert sent[0] == [{"role": "user", "content": "First\n\nSecond"}]
    assert [message["role"] for message in sent[1]] == ["user", "assistant", "user"]


def test_the_end_of_a_word_in_an_input_method_sends_nothing(page: Page) -> None:
    """Safari ends the composition before the key that ends it, whose code is 229."""
    page.open()
    field = page.tab.get_by_label("Message")
    field.fill("ni")
    for code, left in ((229, "ni"), (13, "")):
        field.dispatch_event("keydown", {"key": "Enter", "keyCode": code})
        page.tab.wait_for_function(
            "left => document.querySelector('#question').value === left", arg=left
        )
    assert page.tab.locator(".turns li").count() == 1


def test_a_limit_tells_how_long_to_wait(chromium: Any, tmp_path: Path) -> None:
    with keyed_page(chromium, tmp_path, 401, 429, requests_per_minute=1) as (page, secret):
        page.tab.goto(page.url)
        enter(page, secret)
        page.tab.locator(".status .words", has_text="Ready").wait_for()
        page.ask("Hi").answered()
        page.ask("Hi again")
        page.tab.get_by_text(re.compile(r"Rate limit reached.*Try again in \d+ s")).wait_for()


HOSTILE = (
    f"{SAY} <img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) "
    "![b](https://example.com/track.png) <iframe src='//example.com'></iframe> "
    "<a href='https://example.com' onclick='alert(4)' style='position:fixed'>c</a> "
    "[d](https://example.com) `<b>`"
)


@pytest.mark.parametrize("marks", [True, False], ids=["marks", "formatted"])
def test_hostile_output_stays_text(page: Page, marks: bool) -> None:
    asked: list[str] = []
    page.tab.on("request", lambda request: asked.append(request.url))
    page.open()
    if not marks:
        page.tab.get_by_role("button", name="Marks").click()
    answer = page.ask(HOSTILE).answered()
    assert answer.locator("img, script, iframe, [onclick], [onerror], [style]").count() == 0
    hrefs = [] if marks else [None, "https://example.com"]
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == hrefs
    assert "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert all(url.startswith(page.url) for url in asked)


def test_a_word_without_end_freezes_nothing(page: Page, gateway: StandInGateway) -> None:
    """100,000 characters without a space, in both views; the page answers all the while."""
    page.open()
    page.tab.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body="".join(
                'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n'
                % ("a" * 100)
                for _ in range(1000)
            )
            + "data: [DONE]\n\n",
        ),
    )
    began = time.monotonic()
    answer = page.ask("Never stop").answered()
    for _ in range(2):
        page.tab.get_by_role("button", name="Marks").click()
        assert len(answer.inner_text()) >= 100_000
    assert time.monotonic() - began < 15  # of a busy machine; it takes less than one
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "page", [{"color_scheme": scheme} for scheme in SCHEMES], indirect=True, ids=SCHEMES
)
def test_every_view_fits_and_is_accessible(page: Page) -> None:
    page.open().ask(f"{SAY} Hi, `x` **y**.").answered()
    for size in (PHONE, DESK, WALL):
        page.tab.set_viewport_size(size)
        for view in ("chat", "race", "live"):
            page.tab.evaluate(f"location.hash = '{view}'")
            page.tab.locator(f".{view}").wait_for()
            assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), size
            assert not axe_findings(page.tab), size
        page.tab.evaluate("location.hash = 'chat'")
        page.tab.locator(".composer").wait_for()
        composer = page.tab.locator(".composer").bounding_box()
        send = page.tab.get_by_role("button", name="Send").bounding_box()
        assert send["x"] + send["width"] <= composer["x"] + composer["width"], size
        page.tab.get_by_text("Settings").click()
        assert not axe_findings(page.tab), size
        panel = page.tab.locator(".popover .panel").bounding_box()
        assert panel and panel["x"] >= 0 and panel["y"] >= 0, size
        assert panel["x"] + panel["width"] <= size["width"], size
        page.tab.keyboard.press("Escape")


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    page.open()
    seen = set()
    for _ in range(40):
        page.tab.keyboard.press("Tab")
        seen.add(
            page.tab.evaluate(
                "(document.activeElement.getAttribute('aria-label')"
                " ?? document.activeElement.id) || document.activeElement.textContent"
            )
        )
    assert {"Skip to the content", "Chat", "Race", "question", "Settings"} <= seen
    assert any("Colours" in name for name in seen)
    page.tab.focus("#question")
    page.tab.keyboard.type("Hi")
    page.tab.keyboard.press("Enter")
    assert page.answered().locator(".t").count() > 0


FETCH = """async (body) => {
  const began = performance.now();
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body),
  });
  const reader = response.body.getReader();
  for (let text = ""; !/"content":"[^"]/.test(text);)
    text += new TextDecoder().decode((await reader.read()).value);
  const took = performance.now() - began;
  await reader.cancel();
  return took;
}"""


def test_the_page_adds_little_to_the_time_to_the_first_token(page: Page) -> None:
    """Beside a bare request of the same browser, which a busy machine delays as much."""
    page.open()
    message = {"role": "user", "content": "Hi"}
    body = {"model": "aerie-embedded", "messages": [message], "stream": True, "temperature": 0}
    added = []
    for _ in range(5):
        bare = page.tab.evaluate(FETCH, body)
        page.ask("Hi").answered()
        text = page.tab.locator("[data-figure=first]").last.inner_text()
        number, unit = text.split()
        added.append(float(number) * (1000 if unit == "s" else 1) - bare)
        if added[-1] < 50:
            break
        page.tab.get_by_role("button", name="New chat").click()
    assert min(added) < 50
