"""The page in a real Chromium over a fleet: every state that it can be in, what it loads, and that everybody can use it.

`PREFETCHER_TEST_PICTURES` names a folder for pictures of every tab, at three widths, light and dark.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_kit import complaints_of
from dashboard_fleet import Fleet, served
from waiting import eventually

from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher_connectors.memory import MemoryState

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TABS = ("worth", "now", "why", "wrong", "jobs")
LONG_MS = 60_000


class State(MemoryState):
    """A store that can be away."""

    away = False

    def read_many(self, keys: Any) -> list[bytes | None]:
        if self.away:
            raise UnavailableError("the state server does not answer")
        return super().read_many(keys)


@pytest.fixture(scope="module")
def state() -> State:
    return State(SystemClock())


@pytest.fixture(scope="module")
def fleet(state: State) -> Fleet:
    made = Fleet(state, models=300, nodes=60, known=30, held=12)
    made.write(SystemClock().now_s())
    return made


@pytest.fixture(scope="module")
def url(state: State, fleet: Fleet) -> Iterator[str]:
    with served(state, fleet) as found:
        yield found


class Visit:
    """A page, with what it complained of and what it asked for. The policy of the page is in force, unless a test evaluates scripts."""

    def __init__(self, browser: Browser, address: str, **more: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1024, "height": 900}} | more)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LONG_MS)
        self.complaints = complaints_of(self.page)
        self.refused: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.refused.append(message.text) if "Content Security Policy" in message.text else None)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            assert self.complaints == []
            assert self.refused == []
            assert self.context.cookies() == []
        self.context.close()


def settled(page: Page) -> None:
    """Until the open tab has figures."""
    page.wait_for_selector("main section")
    page.wait_for_selector(".live .sign.good")
    eventually(lambda: page.locator(".waiting").count() == 0)


def address_of(url: str, fleet: Fleet, tab: str) -> str:
    model = fleet.names[int(fleet._of_node[0][2])]
    return f"{url}/?tab={tab}&zone=utc" + (f"&model={model}" if tab == "why" else "")


# --- for everybody ---


@pytest.mark.parametrize("tab", TABS)
def test_axe_finds_no_serious_fault(browser: Browser, url: str, fleet: Fleet, tab: str) -> None:
    # Playwright's evaluate takes strings, which the page's own policy forbids. Ten nodes are of every kind: more are more of the same.
    with Visit(browser, f"{address_of(url, fleet, tab)}&nodes=gpu-00", color_scheme="light", bypass_csp=True) as page:
        settled(page)
        assert serious_faults(page) == []
        page.emulate_media(color_scheme="dark")
        # Colours alone differ.
        assert serious_faults(page, {"runOnly": {"type": "rule", "values": ["color-contrast"]}}) == []


def serious_faults(page: Page, options: dict[str, Any] | None = None) -> list[Any]:
    found = Axe().run(page, options=options).response
    assert found["passes"], "nothing was looked at"
    return [
        (one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found["violations"] if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("tab", TABS)
def test_nothing_is_wider_than_the_page(browser: Browser, url: str, fleet: Fleet, tab: str) -> None:
    wide = "document.documentElement.scrollWidth"
    cut = """[...document.querySelectorAll('main *')]
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll, .unseen, details'))
      .map((e) => e.outerHTML.slice(0, 90))"""
    with Visit(browser, address_of(url, fleet, tab), viewport={"width": 1920, "height": 900}, bypass_csp=True) as page:
        settled(page)
        for width in (1920, 1024, 720, 390):
            page.set_viewport_size({"width": width, "height": 900})
            # Charts are drawn again a moment after the window changed.
            eventually(lambda width=width: page.evaluate(wide) <= width and page.evaluate(cut) == [])


def test_by_keyboard_alone(browser: Browser, url: str, fleet: Fleet) -> None:
    with Visit(browser, f"{url}/?zone=utc", bypass_csp=True) as page:
        settled(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator("#tab-worth").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-now"
        assert page.locator("#tab-now").get_attribute("aria-selected") == "true"
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.id") == "tab-jobs"
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-why"
        # From the tabs into the panel, and there to a model.
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") in ("find", "panel")
        if page.evaluate("document.activeElement.id") == "panel":
            page.keyboard.press("Tab")
        wanted = fleet.names[int(fleet._of_node[3][0])]
        page.keyboard.type(wanted[-5:])
        page.wait_for_selector(f"#found li:has-text('{wanted}')")
        page.keyboard.press("ArrowDown")
        assert page.locator("#find").get_attribute("aria-activedescendant") == "found-0"
        page.keyboard.press("Enter")
        page.wait_for_selector(f"h2.name:has-text('{wanted}')")
        chart = page.locator("svg[data-chart='requests']")
        chart.focus()
        page.keyboard.press("End")
        said = chart.get_attribute("aria-valuetext") or ""
        assert "to" in said
        assert page.locator("[data-readout='requests']").inner_text() == said


def test_it_says_when_motion_is_not_wanted_and_follows_the_chosen_colours(browser: Browser, url: str, fleet: Fleet) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Visit(browser, address_of(url, fleet, "now"), color_scheme="light", reduced_motion="reduce", bypass_csp=True) as page:
        settled(page)
        assert page.evaluate("getComputedStyle(document.querySelector('.part')).transitionDuration") == "0s"
        light = page.evaluate(ground)
        page.select_option("#theme", "dark")
        assert page.evaluate(ground) != light
        page.reload()
        settled(page)
        assert page.evaluate(ground) != light
        page.select_option("#theme", "light")
        assert page.evaluate(ground) == light


# --- a whole fleet's figures ---


def test_figures_are_the_reports_own(browser: Browser, url: str, fleet: Fleet) -> None:
    with Visit(browser, f"{url}/?tab=worth&zone=utc") as page:
        settled(page)
        told = page.request.get(f"{url}/v1/report?since=24h&by=hour").json()
        total = told["total"]
        shown = page.locator("section[data-key='outcomes'] .legend").inner_text()
        for name in ("hit", "late", "useless", "displaced"):
            assert f"{name} {total[name]:,} (" in shown
        assert f"of {total['first_waits']['count']:,} first requests" in page.locator("section[data-key='slo']").inner_text()
        page.click("section[data-key='trend'] summary")
        rows = page.locator("section[data-key='trend'] tbody tr").all_inner_texts()
        by_hour = sorted(told["groups"], key=lambda group: float(group["name"]))
        assert [int(row.split("\t")[1].replace(",", "")) for row in rows] == [group["figures"]["requests"] for group in by_hour]


def test_labels_of_waits_do_not_overprint(browser: Browser, url: str, fleet: Fleet) -> None:
    waits_s = {"p50_s": 0.3, "p95_s": 0.3, "p99_s": 0.3}

    def told(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        found["total"]["first_waits"] |= waits_s | {"count": 1}
        route.fulfill(response=answer, json=found)

    with Visit(browser, "about:blank", viewport={"width": 390, "height": 900}) as page:
        page.route("**/v1/report*", told)
        for values, labels in (((0.3, 0.3, 0.3), 1), ((0.3, 0.31, 0.32), 3), ((0.0004, 0.0004, 0.0011), 2)):
            waits_s.update(zip(waits_s, values, strict=True))
            page.goto(url)
            page.locator("section[data-key='slo'] :text('of 1 first request,')").wait_for()
            boxes = [label.bounding_box() or {} for label in page.locator(".scale .point b").all()]
            assert len(boxes) == labels
            rows = sorted((box["y"], box["y"] + box["height"]) for box in boxes)
            assert all(above[1] <= below[0] for above, below in itertools.pairwise(rows))


# --- from one time to another ---


def test_a_range_from_one_time_to_another(browser: Browser, url: str, fleet: Fleet) -> None:
    last = SystemClock().now_s() // 3600 * 3600
    since_s, until_s = last - 4 * 3600, last - 2 * 3600

    def field(at_s: float, shift_h: int) -> str:
        return f"{datetime.fromtimestamp(at_s, timezone(timedelta(hours=shift_h))):%Y-%m-%dT%H:%M}"

    # Two hours behind UTC all year.
    visit = Visit(browser, url, bypass_csp=True, timezone_id="America/Noronha")

    def asked() -> list[tuple[float, float]]:
        found = [parse_qs(urlsplit(address).query) for address in visit.asked if "/v1/report" in address]
        return [(float(each["since"][0]), float(each["until"][0])) for each in found if "until" in each]

    with visit as page:
        settled(page)
        page.locator("#range").focus()
        page.keyboard.press("End")
        page.locator("#between").wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.labels[0].innerText.trim()") == "from"
        eventually(asked)
        assert asked()[0][1] - asked()[0][0] == 86_400.0, "it begins as what was shown before"
        page.fill("#since", field(since_s, -2))
        page.fill("#until", field(until_s, -2))
        eventually(lambda: (since_s, until_s) in asked())
        told = page.request.get(f"{url}/v1/report?since={since_s}&until={until_s}").json()["total"]
        assert told["requests"] == 2 * 60 * 40, "two of eight hours"
        page.locator(f"section[data-key='head']:has-text('in {told['requests']:,} requests')").wait_for()
        assert page.locator("section[data-key='trend'] tbody tr").count() == 2
        shared = page.url
        before = len(asked())
        page.fill("#until", field(since_s - 60, -2))
        page.locator("#zone").focus()
        page.locator("#between-why:has-text('It must end after it begins')").wait_for()
        assert page.locator("#until").get_attribute("aria-invalid") == "true"
        assert page.url == shared
        assert set(asked()[before:]) <= {(since_s, until_s)}
        assert serious_faults(page) == []
        page.fill("#until", "")
        page.locator("section[data-key='head'] .small:has-text('From')").wait_for()
        eventually(lambda: "until=" not in page.url)
        assert page.locator("#between-why").inner_text() == ""
        page.select_option("#range", "7d")
        page.locator("#between").wait_for(state="hidden")
        assert "since" not in page.url
    with Visit(browser, f"{shared}&zone=utc") as page:
        settled(page)
        assert [page.locator(end).input_value() for end in ("#since", "#until")] == [field(since_s, 0), field(until_s, 0)]
        page.locator(f"section[data-key='head']:has-text('in {told['requests']:,} requests')").wait_for()
    with Visit(browser, f"{url}/?range=between&since=9&until=never") as page:
        settled(page)
        assert page.locator("#range").input_value() == "24h"


# --- what it loads ---


def test_it_loads_nothing_from_elsewhere_and_few_things(browser: Browser, url: str, fleet: Fleet) -> None:
    visit = Visit(browser, address_of(url, fleet, "now"))
    with visit as page:
        settled(page)
        assert [asked for asked in visit.asked if not asked.startswith((url, "data:"))] == []
        assert page.locator("table.matrix tbody tr").count() == 25, "a page of nodes, not all of them"
        assert len([asked for asked in visit.asked if "/v1/" in asked]) <= 8


# --- empty, old, gone ---


def test_an_installation_that_has_nothing_yet_says_what_comes_next(browser: Browser) -> None:
    with served(MemoryState(SystemClock())) as empty, Visit(browser, f"{empty}/?tab=now") as page:
        page.wait_for_selector("main section")
        page.locator("main :text('No node has reported yet')").wait_for()
        page.click("#tab-jobs")
        page.locator("main :text('No scheduler ever looked for work here')").wait_for()
        page.click("#tab-why")
        page.locator("main :text('No node that reports knows a model')").wait_for()
        page.click("#tab-wrong")
        page.locator("main .empty:has-text('Nothing is wrong')").wait_for()
        page.click("#tab-worth")
        page.locator("main :text('No request came in this range')").wait_for()


def test_agents_that_stop_are_said_to_be_silent_and_for_how_long(browser: Browser) -> None:
    state = MemoryState(SystemClock())
    fleet = Fleet(state, models=20, nodes=3, known=10, held=4)
    fleet.write(SystemClock().now_s())
    with served(state, fleet) as url, Visit(browser, f"{url}/?tab=now") as page:
        settled(page)
        fleet.silent = {"gpu-001"}
        page.locator("main .problem:has-text('gpu-001 (silent for')").wait_for()
        page.locator("#tab-now:has-text('1 away')").wait_for()
        assert page.locator("tr[data-key='gpu-000']").count() == 1
        assert page.locator("tr[data-key='gpu-001']").count() == 0
        fleet.silent = set(fleet.node_names)
        page.locator("#notice:has-text('No node reports')").wait_for()
        page.locator("#tab-now:has-text('No node reports')").wait_for()
        fleet.silent = set()
        page.locator("#notice").wait_for(state="hidden")
        page.locator("tr[data-key='gpu-001']").wait_for()


def test_a_store_that_is_away_leaves_what_was_known_with_its_age(browser: Browser, url: str, state: State, fleet: Fleet) -> None:
    with Visit(browser, address_of(url, fleet, "now")) as page:
        settled(page)
        state.away = True
        try:
            page.locator('#notice:has-text("can\'t be read")').wait_for()
            page.locator("#notice:has-text('What is shown is as of')").wait_for()
            assert page.locator("table.matrix tbody tr").count() == 25
        finally:
            state.away = False
        page.locator("#notice").wait_for(state="hidden")
        page.wait_for_selector(".live .sign.good")


def test_a_server_that_goes_and_comes_back(browser: Browser, state: State, fleet: Fleet) -> None:
    with served(state, fleet) as first:
        visit = Visit(browser, f"{first}/?tab=now")
        page = visit.page
        settled(page)
    page.locator("#notice:has-text('The connection is lost')").wait_for()
    page.wait_for_selector(".live .sign.bad")
    assert page.locator("table.matrix tbody tr").count() == 25, "what was known stays, with its age"
    with served(state, fleet, port=int(first.rpartition(":")[2])):
        page.locator("#notice").wait_for(state="hidden")
        page.wait_for_selector(".live .sign.good")
        assert visit.complaints == []
        visit.context.close()


def test_a_question_that_fails_is_told_and_asked_again(browser: Browser, url: str, fleet: Fleet) -> None:
    visit = Visit(browser, f"{url}/?tab=jobs")
    with visit as page:
        settled(page)
        failing = threading.Event()
        failing.set()
        page.route(
            "**/v1/findings*",
            lambda route: route.fulfill(status=503, json={"detail": "not just now"}) if failing.is_set() else route.continue_(),
        )
        page.click("#tab-wrong")
        page.locator("main .problem:has-text('not just now')").wait_for()
        failing.clear()
        page.click("main [data-act='again']")
        page.locator("main .findings").first.wait_for()
        assert page.locator("main .problem").count() == 0


# --- a view that is shared ---


def test_the_address_has_the_view_and_gives_it_back(browser: Browser, url: str, fleet: Fleet) -> None:
    with Visit(browser, url) as page:
        settled(page)
        page.select_option("#range", "7d")
        page.click("#tab-now")
        page.select_option("[data-field='sort']", "name")
        page.fill("[data-field='nodes']", "rack-1")
        page.locator("main :text('20 of 60 nodes')").wait_for()
        page.fill("[data-field='nodes']", "")
        page.locator("main :text('60 nodes:')").wait_for()
        page.click("main .pager button:has-text('After')")
        page.wait_for_selector("tr[data-key='gpu-025']")
        shared = page.url
        assert "tab=now" in shared
        assert "range=7d" in shared
        page.go_back()
        page.wait_for_selector("tr[data-key='gpu-000']")
    with Visit(browser, shared) as page:
        settled(page)
        page.wait_for_selector("tr[data-key='gpu-025']")
        assert page.locator("#range").input_value() == "7d"
        assert page.locator("[data-field='sort']").input_value() == "name"
        assert page.locator("#tab-now").get_attribute("aria-selected") == "true"


def test_names_of_models_are_never_markup(browser: Browser) -> None:
    state = MemoryState(SystemClock())
    fleet = Fleet(state, models=12, nodes=1, known=12, held=6)
    evil = "<img src=x onerror=alert(1)>'\"/../%2f?&#"
    fleet.names = [evil + str(i) for i in range(12)]
    fleet.write(SystemClock().now_s())
    with served(state, fleet) as url, Visit(browser, f"{url}/?tab=now") as page:
        settled(page)
        page.click("main a[data-act='model'] >> nth=0")
        page.wait_for_selector("h2.name")
        page.locator("main h3:has-text('Where it is')").wait_for()
        assert page.locator("h2.name").inner_text().startswith(evil)
        assert page.locator("img").count() == 0


# --- pictures ---


@pytest.mark.skipif("PREFETCHER_TEST_PICTURES" not in os.environ, reason="PREFETCHER_TEST_PICTURES names no folder")
def test_pictures(browser: Browser, url: str, fleet: Fleet) -> None:
    folder = Path(os.environ["PREFETCHER_TEST_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    for tab in TABS:
        for width in (390, 1024, 1920):
            for scheme in ("light", "dark"):
                with Visit(browser, address_of(url, fleet, tab), viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
                    settled(page)
                    page.screenshot(path=folder / f"{tab}-{width}-{scheme}.png", full_page=True)
    assert eventually(lambda: len(list(folder.glob("*.png"))) >= len(TABS) * 6)
