"""The page over a real `prefetcher up` with real traffic: each of the five questions is answered with what the system really did."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from browser_kit import complaints_of
from up_kit import Up, eventually, running

from prefetcher.agent.client import open_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPERATOR, READER = "sk_operator-0123456789", "sk_gateway-0123456789ab"
KEYS = [
    {"key": OPERATOR, "name": "ops", "roles": ["operator", "ingest", "hint"]},
    {"key": READER, "name": "gateway", "roles": ["ingest"]},
]
LONG_MS = 60_000
#: Requests for each model, and opens of it among them.
TRAFFIC = {"m0": (12, 4), "m1": (7, 2), "m2": (3, 1)}


class Asking:
    """An endpoint as a program with a key sees it."""

    def __init__(self, url: str, key: str = OPERATOR) -> None:
        self.url, self.key = url, key

    def __call__(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"X-Api-Key": self.key})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running(tmp_path_factory.mktemp("up"), KEYS) as made:
        yield made


@pytest.fixture(scope="module")
def ask(up: Up) -> Asking:
    """After traffic: rows of three models, opens, a pin, a hint, a schedule, and rows for a model that nobody has."""
    found = Asking(up.url)
    for model, (rows, opens) in TRAFFIC.items():
        for number in range(rows):
            eventually(lambda model=model, number=number: found("/v1/requests", {"model": model, "request_id": f"{model}-{number}"}))
            if number < opens:
                with open_model(model, socket_path=up.folder / "agent.sock", timeout_s=60.0):
                    pass
    eventually(lambda: found("/v1/requests", [{"model": "ghost"}] * 5))
    eventually(lambda: found("/v1/models/m2:pin", {}))
    eventually(lambda: found("/v1/hints", {"model": "m3", "source": "chat"}))
    eventually(lambda: found("/v1/schedules", {"name": "nightly", "models": ["m0", "m1"], "at": "02:00", "for_s": 1800, "replace": True}))
    eventually(lambda: any(order["model"] == "m3" for order in found("/v1/orders")))
    eventually(lambda: found("/v1/report?since=24h")["total"]["requests"] >= 22)
    return found


@pytest.fixture
def page(browser: Browser, up: Up, ask: Asking) -> Iterator[Page]:
    """A visit that gave the operator's key."""
    made = visit(browser, f"{up.url}/?zone=utc", OPERATOR)
    complaints = complaints_of(made)
    yield made
    assert complaints == []
    assert made.context.cookies() == []
    made.context.close()


def visit(browser: Browser, address: str, key: str) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.set_default_timeout(LONG_MS)
    page.goto(address)
    page.locator("#key-dialog[open]").wait_for()
    page.fill("#key", key)
    page.click("#key-form button")
    page.locator("#key-dialog[open]").wait_for(state="detached")
    page.wait_for_selector(".live .sign.good")
    return page


def number_in(text: str) -> float:
    found = re.search(r"-?[\d,]+(\.\d+)?(e-?\d+)?", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def test_is_it_worth_it(page: Page, ask: Asking) -> None:
    page.click("#tab-worth")
    page.wait_for_selector(".figure .big")

    def agrees() -> bool:
        total = ask("/v1/report?since=24h")["total"]
        shown = [number_in(text) for text in page.locator(".figure .big").all_inner_texts()[:2]]
        requests = page.locator(".figure").first.inner_text()
        return f"in {total['requests']:,} requests" in requests and shown[1] == pytest.approx(total["idle_gb_h"], rel=0.2, abs=1e-4)

    eventually(agrees)
    # One node alone has no control group.
    assert page.locator(".figure").nth(2).inner_text().count("Shadow only") == 1
    total = ask("/v1/report?since=24h")["total"]
    waits = total["first_waits"]
    assert f"{waits['count']} first request" in page.locator("section[data-key='slo']").inner_text()
    # Those that read alike share a label.
    labels = ", ".join(page.locator("section[data-key='slo'] .scale .point b").all_inner_texts())
    assert re.findall(r"p\d+", labels) == ["p50", "p95", "p99"]


def test_what_is_happening_now(page: Page, ask: Asking) -> None:
    page.click("#tab-now")
    row = page.locator("tr[data-key='node-0']")
    row.wait_for()
    (node,) = ask("/v1/nodes")["nodes"]
    host = node["tiers"]["host"]
    assert host["states"]["pinned"] == ask("/v1/residency?model=m2")[0]["bytes"]
    assert f"{host['taken_bytes'] / 1e6:.2g}\xa0MB" in row.inner_text()
    assert "pinned" in (row.locator(".bar").get_attribute("aria-label") or "")
    assert "4 models" in row.inner_text()


def test_why(page: Page, ask: Asking) -> None:
    page.click("#tab-why")
    page.fill("#find", "m3")
    page.click("#found li:has-text('m3')")
    page.locator("h2.name:has-text('m3')").wait_for()
    order = next(order for order in ask("/v1/orders?model=m3"))
    line = page.locator(f"tr[data-key='{order['decision_id']}']")
    line.wait_for()
    assert "a hint" in line.inner_text()
    page.goto(page.url.replace("model=m3", "model=m0"))
    page.locator("h2.name:has-text('m0')").wait_for()
    page.wait_for_selector("details[data-key='requests-table']")

    def counted() -> bool:
        page.locator("section[data-key='requests'] summary").click()
        cells = page.locator("details[data-key='requests-table'] tbody tr td:nth-child(2)").all_text_contents()
        page.locator("section[data-key='requests'] summary").click()
        return sum(int(cell.replace(",", "")) for cell in cells) == TRAFFIC["m0"][0]

    eventually(counted)
    assert sum(ask("/v1/explain/m0")["requests"]["counts"]) == TRAFFIC["m0"][0]
    stage = next(one for one in ask("/v1/models/m0/cold-start")["stages"] if one["stage"] == "read")
    read = page.locator("section[data-key='cold'] li:has-text('disk to host memory')")
    assert f"{stage['count']} measured" in read.inner_text()
    assert "nothing measures it" in page.locator("section[data-key='cold'] li:has-text('host to device memory')").inner_text()


def test_what_is_wrong(page: Page, ask: Asking) -> None:
    page.click("#tab-wrong")
    ghost = page.locator("li:has-text('ghost was asked for 5 times')")
    ghost.wait_for()
    assert ghost.locator("code").inner_text() == "prefetcher manifest DIR/ghost"
    found = ask("/v1/findings")
    assert {one["kind"] for one in found["findings"]} >= {"unknown model"}
    assert page.locator(".findings li").count() == found["in_all"]


def test_jobs_and_run_now(page: Page, ask: Asking) -> None:
    page.click("#tab-jobs")
    row = page.locator("tr[data-key='recalibrate']")
    row.wait_for()
    rows = page.locator("section[data-key='jobs'] tbody tr").all()
    assert {job["name"] for job in ask("/v1/jobs")} == {row.get_attribute("data-key") for row in rows}
    row.locator("button").click()
    page.locator(".said:has-text('recalibrate: done')").wait_for()
    last = eventually(lambda: next((run for run in ask("/v1/jobs/recalibrate/runs") if run["by_hand"]), None))
    assert (last["by"], last["result"]) == ("ops", "done")
    (schedule,) = ask("/v1/schedules")
    assert f"{len(schedule['staged'])} of 2" in page.locator("tr[data-key='nightly']").inner_text()


def test_what_changes_comes_without_a_reload(page: Page, ask: Asking) -> None:
    navigations: list[str] = []
    page.on("framenavigated", lambda frame: navigations.append(frame.url))
    page.click("#tab-now")
    row = page.locator("tr[data-key='node-0']")
    row.wait_for()
    before = len(navigations)
    ask("/v1/models/m1:pin", {})
    pinned = 2 * ask("/v1/residency?model=m1")[0]["bytes"]
    eventually(lambda: ask("/v1/nodes")["nodes"][0]["tiers"]["host"]["states"]["pinned"] == pinned)
    page.locator(f"tr[data-key='node-0'] .bar[aria-label*='{pinned / 1e3:.0f}\xa0kB pinned']").wait_for()
    ask("/v1/observe", {"for_s": 3600})
    page.locator("#mode:has-text('observing')").wait_for()
    page.locator("tr[data-key='node-0']:has-text('observes')").wait_for()
    ask("/v1/on", {})
    page.locator("#mode:has-text('prefetching')").wait_for()
    assert len(navigations) == before


def test_who_may_only_read_may_not_run(browser: Browser, up: Up, ask: Asking) -> None:
    page = visit(browser, f"{up.url}/?tab=jobs", READER)
    page.locator("tr[data-key='recalibrate']").wait_for()
    assert page.locator("section[data-key='jobs'] button:enabled").count() == 0
    page.locator("main :text('Run now takes a key with role operator')").wait_for()
    assert READER not in page.url
    page.click("#forget-key")
    page.locator("#key-dialog[open]").wait_for()
    page.context.close()


def test_a_wrong_key_is_asked_for_again(browser: Browser, up: Up, ask: Asking) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(LONG_MS)
    page.goto(up.url)
    page.locator("#key-why:has-text('needs a key')").wait_for()
    page.fill("#key", "sk_something-else-000")
    page.click("#key-form button")
    page.locator("#key-why:has-text('not known')").wait_for()
    page.context.close()


def test_a_page_of_another_site_can_not_use_the_key_of_this_one(up: Up, ask: Asking) -> None:
    request = urllib.request.Request(
        f"{up.url}/v1/jobs/recalibrate:run", b"", {"X-Api-Key": OPERATOR, "Origin": "https://elsewhere.example"}, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    refused.value.close()
    assert refused.value.code == 403
