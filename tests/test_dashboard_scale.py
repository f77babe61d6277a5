"""The page over 10,000 models and 200 nodes: what it weighs, how often it asks, and when it is painted. `-m slow -s` prints the figures.

No time is asserted: it depends on the machine. What is asserted does not: bytes, questions, and how much a browser is given to hold.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from dashboard_fleet import Fleet, served

from prefetcher.clock import SystemClock
from prefetcher_connectors.redis import EmbeddedServer, RedisState

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
#: Bytes on the wire of the page and its files, and of one answer.
_MOST_FILES = 60_000
_MOST_ANSWER = 60_000
_MINUTE_MS = 60_000
#: What is there once a tab has its figures.
_THERE = {"now": "table.matrix tbody tr", "why": "main table tbody tr", "wrong": ".findings li", "worth": ".figure"}
_ASKED = ("/v1/nodes", "/v1/models", "/v1/findings", "/v1/overview")


def test_ten_thousand_models_and_two_hundred_nodes(browser: Browser, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    state = RedisState(server.url)
    fleet = Fleet(state)
    fleet.write(SystemClock().now_s())
    try:
        with served(state, fleet) as url:
            # Playwright's evaluate takes strings, which the page's own policy forbids.
            context = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True)
            page = context.new_page()
            wire = context.new_cdp_session(page)
            wire.send("Network.enable")
            addresses: dict[str, str] = {}
            sizes: Counter[str] = Counter()
            asked: list[str] = []
            wire.on("Network.requestWillBeSent", lambda told: addresses.update({told["requestId"]: told["request"]["url"]}))
            wire.on(
                "Network.loadingFinished",
                lambda told: sizes.update({urlsplit(addresses.get(told["requestId"], "")).path: int(told["encodedDataLength"])}),
            )
            page.on("request", lambda request: asked.append(urlsplit(request.url).path))
            for tab, there in _THERE.items():
                page.goto(f"{url}/?tab={tab}", wait_until="commit")
                page.wait_for_selector(there, timeout=120_000)
                painted = page.evaluate("performance.getEntriesByType('paint').find((e) => e.name == 'first-contentful-paint')?.startTime")
                print(f"{tab}: first paint {painted:.0f} ms, figures {page.evaluate('performance.now()'):.0f} ms")
                nodes = page.evaluate("document.querySelectorAll('*').length")
                if tab == next(iter(_THERE)):
                    files = {path: size for path, size in sizes.items() if not path.startswith("/v1/")}
                    print(f"first visit: {sum(files.values()) / 1000:.0f} kB in {len(files)} files: {files}")
                    assert sum(files.values()) <= _MOST_FILES
                assert nodes < 3000, f"{tab} has {nodes} elements"
            page.goto(f"{url}/?tab=now")
            page.wait_for_selector("table.matrix tbody tr", timeout=120_000)
            asked.clear()
            sizes.clear()
            page.wait_for_timeout(_MINUTE_MS)
            minute = Counter(asked)
            print(f"a minute of a page that changes all the time: {dict(minute)}, {sum(sizes.values()) / 1000:.0f} kB beside the events")
            assert sum(minute.values()) <= 90
            answers = {
                path: page.request.get(f"{url}{path}").body() for path in ("/v1/nodes", "/v1/models", "/v1/findings", "/v1/overview")
            }
            print({path: len(body) for path, body in answers.items()})
            assert all(len(body) <= _MOST_ANSWER for body in answers.values())
            context.close()
    finally:
        state.close()
        server.stop()
