"""hint.js in a real Chromium, on pages of another site: what arrives, and that no page waits, throws or leaves a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser_kit import Silent, Site, complaints_of
from up_kit import Up, eventually, running

from prefetcher.dashboard.script import hint_script, stripped

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

KEY = "pk_0123456789abcdef"
FIELDS = {"model", "in_s", "ttl_s", "session", "surface", "kind", "hint_id", "key"}
EXAMPLE = Path(__file__).parent / "examples" / "hint-page"


def page_with(script: str, attributes: str = "", body: str = "") -> str:
    """A page that takes the script as the reference says, so that it never waits for it."""
    return (
        f'<!doctype html><title>a page</title><script data-src="{script}" data-key="{KEY}" {attributes}>'
        f"import(document.currentScript.dataset.src).catch(() => {{}});</script>{body}<p>here"
    )


def tag(script: str, attributes: str = "") -> str:
    return f'<!doctype html><title>a page</title><script async src="{script}" data-key="{KEY}" {attributes}></script><p>here'


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site({"/empty": "<!doctype html><title>empty</title>", "/hint.js": hint_script()}) as made:
        yield made


@pytest.fixture(scope="module")
def up(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    keys = [{"key": KEY, "name": "page", "roles": ["hint"], "origins": [site.origin]}]
    with running(tmp_path_factory.mktemp("up"), keys) as made:
        yield made


class Visit:
    """One visitor: what the page sent, complained of and left behind."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.page: Page = context.new_page()
        self.complaints = complaints_of(self.page)
        self.sent: list[dict[str, Any]] = []
        self.page.on("request", lambda request: self.sent.append(json.loads(request.post_data or "")) if request.method == "POST" else None)

    def wait_for_script(self) -> None:
        self.page.wait_for_function("window.prefetcher && !window.prefetcher.q")


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[[], Visit]]:
    made: list[Visit] = []

    def begin(init: str = "") -> Visit:
        context = browser.new_context()
        if init:
            context.add_init_script(init)
        made.append(Visit(context))
        return made[-1]

    yield begin
    for one in made:
        assert one.complaints == []
        assert all(set(sent) <= FIELDS for sent in one.sent)
        assert one.context.cookies() == []
        one.context.close()


class Arrivals:
    """What came to the stream since the last look."""

    def __init__(self, up: Up) -> None:
        self._up = up
        self._seen = len(up.hints())

    def next(self, count: int) -> list[dict[str, Any]]:
        found = eventually(lambda: len(hints := self._up.hints()) >= self._seen + count and hints)
        fresh = found[self._seen :]
        self._seen = len(found)
        return [json.loads(json.dumps({name: getattr(hint, name) for name in hint.__struct_fields__})) for hint in fresh]


@pytest.fixture
def arrivals(up: Up) -> Arrivals:
    return Arrivals(up)


@pytest.mark.parametrize("way", ["import", "tag"])
def test_a_page_of_another_site_hints_once_when_it_opens(
    way: str, site: Site, up: Up, visit: Callable[[], Visit], arrivals: Arrivals
) -> None:
    shown = 'data-surface="chat" data-model="m0" data-in="5" data-ttl="60"'
    site.pages["/opens"] = page_with(f"{up.url}/hint.js", shown) if way == "import" else tag(f"{up.url}/hint.js", shown)
    guest = visit()
    guest.page.goto(f"{site.origin}/opens")
    guest.wait_for_script()
    (hint,) = arrivals.next(1)
    assert (hint["model"], hint["source"], hint["surface"], hint["kind"]) == ("m0", "page", "chat", "load")
    assert (hint["in_s"], hint["ttl_s"], hint["user"]) == (5, 60, None)
    assert hint["hint_id"] == f"page/{guest.sent[0]['hint_id']}"
    assert guest.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    # A visitor who comes again is told from the first by nothing that the page kept.
    guest.page.reload()
    guest.wait_for_script()
    (again,) = arrivals.next(1)
    assert again["session"] != hint["session"]


def test_intent_by_hand_and_by_attribute_and_repeats_are_folded(
    site: Site, up: Up, visit: Callable[[], Visit], arrivals: Arrivals
) -> None:
    body = """<button id=b data-hint="m1"><b id=inner>one</b></button><input id=i data-hint="m2">
              <select id=s data-hint><option>m0<option>m3</select><i data-hint id=empty>none</i>"""
    site.pages["/intent"] = page_with(f"{up.url}/hint.js", body=body)
    guest = visit()
    guest.page.goto(f"{site.origin}/intent")
    guest.wait_for_script()
    taken = []
    for _ in range(3):
        guest.page.hover("#inner")
        guest.page.hover("#empty")
        guest.page.locator("#i").fill("some words")
        guest.page.select_option("#s", "m3")
        taken.append(guest.page.evaluate("prefetcher.hint({model: 'm0', ttl_s: 30})"))
    assert taken == [True, False, False]
    # What is expected sooner is another hint.
    assert guest.page.evaluate("[3, 3].map((in_s) => prefetcher.hint({model: 'm0', in_s: in_s}))") == [True, False]
    found = [(hint["model"], hint["kind"], hint["in_s"]) for hint in arrivals.next(5)]
    assert sorted(found) == [("m0", "intent", 0), ("m0", "intent", 3), *((f"m{i}", "intent", 0) for i in (1, 2, 3))]
    assert len(guest.sent) == 5
    assert len({hint["session"] for hint in guest.sent}) == 1


def test_what_is_not_a_hint_is_not_sent_and_does_not_throw(site: Site, up: Up, visit: Callable[[], Visit]) -> None:
    site.pages["/wrong"] = page_with(f"{up.url}/hint.js")
    guest = visit()
    guest.page.goto(f"{site.origin}/wrong")
    guest.wait_for_script()
    calls = "[undefined, null, 7, 'm0', {}, {model: ''}, {get model() { throw 1 }}, {model: 1n}, Object.create(null)]"
    assert guest.page.evaluate(f"{calls}.map((what) => prefetcher.hint(what))") == [False] * 9
    circle = "(() => { let a = {}; a.model = a; return prefetcher.hint(a) })()"
    assert guest.page.evaluate(circle) is False
    assert guest.sent == []


def test_what_was_said_before_the_script_came_is_said_then(site: Site, up: Up, visit: Callable[[], Visit], arrivals: Arrivals) -> None:
    before = "<script>window.prefetcher = {q: [{model: 'm1', kind: 'load'}], hint(what) { this.q.push(what) }}</script>"
    site.pages["/early"] = before + page_with(f"{up.url}/hint.js")
    guest = visit()
    guest.page.goto(f"{site.origin}/early")
    assert [(hint["model"], hint["kind"]) for hint in arrivals.next(1)] == [("m1", "load")]


@pytest.mark.parametrize(
    "broken",
    ["navigator.sendBeacon = () => false", "navigator.sendBeacon = undefined"],
)
def test_without_a_beacon_a_kept_alive_fetch_goes(
    broken: str, site: Site, up: Up, visit: Callable[..., Visit], arrivals: Arrivals
) -> None:
    site.pages["/fetch"] = page_with(f"{up.url}/hint.js", 'data-model="m2"')
    guest = visit(broken)
    guest.page.goto(f"{site.origin}/fetch")
    assert [hint["model"] for hint in arrivals.next(1)] == ["m2"]


def test_a_hint_outlives_the_page_that_gave_it(site: Site, up: Up, visit: Callable[[], Visit], arrivals: Arrivals) -> None:
    site.pages["/leaves"] = page_with(f"{up.url}/hint.js")
    guest = visit()
    guest.page.goto(f"{site.origin}/leaves")
    guest.wait_for_script()
    with guest.page.expect_navigation(url="**/empty"):
        guest.page.evaluate("prefetcher.hint({model: 'm3'}); location.href = '/empty'")
    assert [(hint["model"], hint["kind"]) for hint in arrivals.next(1)] == [("m3", "intent")]


def test_a_page_that_is_rendered_ahead_hints_when_it_is_shown(site: Site, up: Up, visit: Callable[..., Visit], arrivals: Arrivals) -> None:
    site.pages["/ahead"] = page_with(f"{up.url}/hint.js", 'data-model="m1"')
    guest = visit("Object.defineProperty(document, 'prerendering', {get: () => true})")
    guest.page.goto(f"{site.origin}/ahead")
    guest.wait_for_script()
    assert guest.sent == []
    guest.page.evaluate("[1, 2].forEach(() => document.dispatchEvent(new Event('prerenderingchange')))")
    assert [hint["model"] for hint in arrivals.next(1)] == ["m1"]


@pytest.mark.parametrize(
    "wish",
    [
        "Object.defineProperty(navigator, 'doNotTrack', {get: () => '1'})",
        "Object.defineProperty(navigator, 'globalPrivacyControl', {get: () => true})",
        "Object.defineProperty(navigator, 'connection', {get: () => ({saveData: true})})",
    ],
)
def test_who_wants_to_be_left_alone_is(wish: str, site: Site, up: Up, visit: Callable[..., Visit], arrivals: Arrivals) -> None:
    site.pages["/alone"] = page_with(f"{up.url}/hint.js", 'data-model="m0"')
    alone, other = visit(wish), visit()
    alone.page.goto(f"{site.origin}/alone")
    alone.wait_for_script()
    other.page.goto(f"{site.origin}/alone")
    other.wait_for_script()
    (hint,) = arrivals.next(1)
    assert alone.page.evaluate("prefetcher.hint({model: 'm1'})") is False
    assert hint["hint_id"] == f"page/{other.sent[0]['hint_id']}"
    assert alone.sent == []


def test_a_page_whose_origin_no_key_names_is_refused_and_stays_whole(up: Up, visit: Callable[[], Visit], arrivals: Arrivals) -> None:
    with Site({"/": page_with(f"{up.url}/hint.js", 'data-model="m0"', "<p id=whole>whole")}) as stranger:
        guest = visit()
        with guest.page.expect_response("**/v1/hints") as answer:
            guest.page.goto(stranger.origin)
        assert answer.value.status == 403
        assert guest.page.locator("#whole").inner_text() == "whole"
    assert arrivals._up.hints()[arrivals._seen :] == []


def test_a_page_may_say_where_it_is_and_not_which_model(site: Site, up: Up, visit: Callable[[], Visit], arrivals: Arrivals) -> None:
    site.pages["/nameless"] = page_with(f"{up.url}/hint.js", 'data-surface="settings"')
    guest = visit()
    guest.page.goto(f"{site.origin}/nameless")
    assert [(hint["model"], hint["surface"], hint["kind"]) for hint in arrivals.next(1)] == [(None, "settings", "load")]


# --- an endpoint that is slow, and one that is away ---


def loads_and_leaves(guest: Visit, site: Site, path: str) -> None:
    """The page has its load event, and is left for another one."""
    guest.page.goto(site.origin + path, wait_until="load")
    assert guest.page.evaluate("document.readyState") == "complete"
    with guest.page.expect_navigation(url="**/empty", wait_until="load"):
        guest.page.evaluate("location.href = '/empty'")


def test_an_endpoint_that_does_not_answer_delays_neither_load_nor_unload(site: Site, visit: Callable[[], Visit]) -> None:
    # Nothing is answered until all of this is over: whatever waits for an answer never ends.
    with Silent() as slow:
        site.pages["/slow-script"] = page_with(f"{slow.url}/hint.js", 'data-model="m0"')
        guest = visit()
        loads_and_leaves(guest, site, "/slow-script")
        slow.wait_for(b"GET /hint.js")
    with Silent() as slow:
        site.pages["/slow-hints"] = tag("/hint.js", f'data-model="m0" data-url="{slow.url}/v1/hints"')
        guest = visit()
        loads_and_leaves(guest, site, "/slow-hints")
        assert b'"model":"m0"' in slow.wait_for(b'"m0"')


def test_a_plain_tag_waits_for_a_script_that_does_not_come(site: Site, visit: Callable[[], Visit]) -> None:
    # What the reference warns of, and what shows that the tests around it could fail.
    with Silent() as slow:
        site.pages["/waits"] = tag(f"{slow.url}/hint.js")
        guest = visit()
        guest.page.goto(f"{site.origin}/waits", wait_until="domcontentloaded")
        slow.wait_for(b"GET /hint.js")
        assert guest.page.evaluate("document.readyState") == "interactive"
        slow.release()
        guest.page.wait_for_load_state("load")


@pytest.mark.parametrize("way", ["import", "tag", "fetch"])
def test_an_endpoint_that_is_away_delays_nothing_and_is_no_error_of_the_page(way: str, site: Site, visit: Callable[..., Visit]) -> None:
    with Silent() as gone:
        away = gone.url
    site.pages["/away"] = {
        "import": page_with(f"{away}/hint.js", 'data-model="m0"'),
        "tag": tag(f"{away}/hint.js", 'data-model="m0"'),
        "fetch": tag("/hint.js", f'data-model="m0" data-url="{away}/v1/hints"'),
    }[way]
    guest = visit("navigator.sendBeacon = () => false" if way == "fetch" else "")
    with guest.page.expect_event("requestfailed"):
        loads_and_leaves(guest, site, "/away")


# --- the example, and what is served ---


def test_the_example_page(visit: Callable[[], Visit], tmp_path: Path) -> None:
    with Site({}) as own:
        keys = json.loads((EXAMPLE / "keys.json").read_text().replace("http://localhost:8000", own.origin))
        with running(tmp_path, keys) as up:
            arrivals = Arrivals(up)
            own.pages["/"] = (EXAMPLE / "index.html").read_text().replace("http://127.0.0.1:8371", up.url)
            guest = visit()
            guest.page.goto(own.origin)
            guest.wait_for_script()
            guest.page.select_option("#model", "m1")
            guest.page.locator("#prompt").press_sequentially("why is the sky blue")
            guest.page.hover("#draw")
            guest.page.click("text=Send")
            assert guest.page.locator("#said").inner_text() == "This is where m1 would be asked."
            # The model that was picked comes twice: at once, and in the time that typing takes.
            found = [(hint["model"], hint["kind"], hint["surface"]) for hint in arrivals.next(4)]
            assert set(found) >= {("m0", "load", "chat"), ("m1", "intent", "chat"), ("m2", "intent", "chat")}
            for model in ("m0", "m1", "m2"):
                eventually(lambda model=model: model in ready_of(up))


def ready_of(up: Up) -> set[str]:
    import urllib.request

    request = urllib.request.Request(f"{up.url}/v1/residency", headers={"X-Api-Key": "sk_hint-page-operator"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return {row["model"] for row in json.load(answer) if row["state"] == "ready"}


def test_the_script_is_small_whole_and_kept_by_browsers(site: Site, up: Up, browser: Browser) -> None:
    assert len(hint_script()) < 2000
    page = browser.new_page()
    first = page.request.get(f"{up.url}/hint.js")
    assert (first.status, first.body()) == (200, hint_script())
    assert first.headers["content-type"].startswith("text/javascript")
    assert "max-age=3600" in first.headers["cache-control"]
    again = page.request.get(f"{up.url}/hint.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body()) == (304, b"")
    assert page.request.get(f"{up.url}/hint.js", headers={"If-None-Match": '"other"'}).status == 200
    assert page.request.head(f"{up.url}/hint.js").status == 200
    page.close()


def test_stripping_keeps_every_token() -> None:
    source = 'var a = "x // y /* z";  // said\nif (a - -1) {\n  b = 1;\n  c = a + +b;\n}\n/* more */ return typeof a;'
    assert stripped(source) == 'var a="x // y /* z";if(a- -1){b=1;c=a+ +b}return typeof a;'
    for refused in ("a = `x`;", "a = b / c;", 'a = "open'):
        with pytest.raises(ValueError, match="line 1"):
            stripped(refused)
