"""Windows over HTTP and from the command line: what is in force, pins, the way back, and who did it; and what prefetching saves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from api_kit import Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from prefetcher import cli
from prefetcher.controller import records
from prefetcher.controller.windows import WINDOW_EVENTS, WINDOW_FACTS, WINDOWS, WindowEvent, WindowShelf, WindowView
from prefetcher.core.types import Window
from prefetcher.core.windows import DEFAULT_WINDOW, BookEntry, Segment, WindowBook
from prefetcher.errors import InputError, UnavailableError, UsageError
from prefetcher.ports import StateStore
from prefetcher_connectors.memory import MemoryState

BUSY, RARE = Segment("busy", (("rows_per_day", 24.0, float("inf")),)), Segment("rare")
SHORT, LONG = Window(300.0, 900.0, 120.0), Window(300.0, 900.0, 3600.0)


def shelf_of(state: StateStore) -> WindowShelf:
    """Windows as the tuner would have left them: two segments, version 1, tuned once more to version 2."""
    shelf = WindowShelf(state)
    book = WindowBook((BookEntry(BUSY), BookEntry(RARE)))
    shelf.change(lambda _, __: (book, [WindowEvent(1.0, "segments", "tune-windows", 0)], None))
    event = WindowEvent(2.0, "tuned", "tune-windows", 0, "busy", why="less waiting", evidence={"rows": 5})
    shelf.change(lambda book, _: (book.changed("busy", SHORT, 2.0, "less waiting"), [event], 2.0))
    return shelf


@pytest.fixture
def setup() -> Iterator[Setup]:
    with Setup() as made:
        made.report()
        yield made


def test_an_installation_begins_with_the_windows_of_the_deciding_expert(setup: Setup) -> None:
    found = setup.http.get("/v1/windows").json()
    assert (found["version"], found["segments"], found["events"], found["versions"]) == (0, [], [], [])
    assert found["rest"] == {"lead_s": DEFAULT_WINDOW.lead_s, "horizon_s": 0.0, "hold_s": 600.0}
    assert setup.http.post("/v1/windows:rollback", json={}).status_code == 400
    assert "nothing to go back to" in setup.http.post("/v1/windows:rollback", json={}).json()["detail"]


def test_a_pin_is_kept_with_who_did_it_and_undone(setup: Setup) -> None:
    shelf_of(setup.state)
    found = setup.http.get("/v1/windows").json()
    assert [(s["name"], s["window"]["hold_s"], s["pinned"]) for s in found["segments"]] == [("busy", 120.0, False), ("rare", 600.0, False)]
    assert found["watched_from_s"] == 2.0
    assert found["segments"][0]["rule"] == {"rows_per_day": [24.0, None]}
    pinned = setup.http.post("/v1/windows:pin", json={"segment": "busy", "hold_s": 3600}).json()
    busy = pinned["segments"][0]
    assert (busy["pinned"], busy["window"]) == (True, {"lead_s": 300.0, "horizon_s": 900.0, "hold_s": 3600.0})
    # The change that was watched is no longer in force.
    assert pinned["watched_from_s"] is None
    (event,) = pinned["events"]
    assert (event["act"], event["version"], event["old"]["hold_s"], event["new"]["hold_s"]) == ("pinned", 3, 120.0, 3600.0)
    assert setup.http.post("/v1/windows:pin", json={"segment": "busy"}).json()["version"] == 3
    unpinned = setup.http.post("/v1/windows:unpin", json={"segment": "busy"}).json()
    assert (unpinned["version"], unpinned["segments"][0]["pinned"]) == (4, False)
    assert [e["act"] for e in setup.http.get("/v1/windows").json()["events"]] == ["unpinned", "pinned", "tuned", "segments"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("pin", {"segment": "nobody"}, "no segment is called 'nobody'; there are 'busy', 'rare'"),
        ("pin", {"segment": "busy", "horizon_s": 77}, "horizon_s is one of"),
        ("pin", {"segment": "busy", "hold_s": 1e9}, "hold_s is above 0"),
        ("pin", {"segment": "busy", "hold_s": -1}, "greater than 0"),
        ("unpin", {"segment": "nobody"}, "no segment"),
        ("rollback", {"version": 99}, "no version 99 is kept; now is version 2, before it were 0, 1"),
    ],
)
def test_what_cannot_be_is_refused_and_said(setup: Setup, path: str, body: dict[str, Any], says: str) -> None:
    shelf_of(setup.state)
    answer = setup.http.post(f"/v1/windows:{path}", json=body)
    assert answer.status_code == 400
    assert says in answer.text
    assert setup.http.get("/v1/windows").json()["version"] == 2


def test_going_back_puts_earlier_windows_in_force_and_leaves_pins(setup: Setup) -> None:
    shelf = shelf_of(setup.state)
    back = setup.http.post("/v1/windows:rollback", json={}).json()
    assert (back["version"], back["segments"][0]["window"]["hold_s"]) == (3, 600.0)
    assert (back["events"][0]["act"], back["events"][0]["segment"]) == ("rolled_back", "busy")
    forth = setup.http.post("/v1/windows:rollback", json={"version": 2}).json()
    assert (forth["version"], forth["segments"][0]["window"]["hold_s"]) == (4, 120.0)
    shelf.pin("busy", LONG, "ann", 9.0)
    kept = setup.http.post("/v1/windows:rollback", json={"version": 1}).json()
    assert (kept["segments"][0]["window"]["hold_s"], kept["segments"][0]["pinned"]) == (3600.0, True)


def test_what_prefetching_saves_is_told_or_why_it_is_not_known(setup: Setup) -> None:
    found = setup.http.get("/v1/effect").json()
    assert (found["basis"], found["running"]) == ("nothing", False)
    assert "nothing was measured yet" in found["words"]


def test_the_command_line_shows_and_changes_windows(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf_of(setup.state)

    def ask(url: str, path: str, method: str, body: Any = None) -> Any:
        answer = setup.http.request(method, path, json=body)
        assert answer.status_code < 400, answer.text
        return answer.json()

    monkeypatch.setattr("prefetcher.api.client._ask", ask)

    def run(*args: str) -> str:
        result = CliRunner().invoke(cli.app, ["windows", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    listed = run("list")
    assert "busy" in listed
    assert "lead 5 min, horizon 15 min, hold 2 min" in listed
    assert "version 2, watched since" in listed
    assert "pinned: at any time, the expert's horizon, hold 1" in run("pin", "busy", "--lead", "any", "--horizon", "own", "--hold", "1m")
    assert "unpinned" in run("unpin", "busy")
    assert "now version 5" in run("rollback", "2")
    history = run("history")
    assert [word for word in ("rolled_back", "unpinned", "pinned", "tuned", "segments") if word in history] == [
        "rolled_back", "unpinned", "pinned", "tuned", "segments",
    ]  # fmt: skip
    assert json.loads(run("history", "--json", "--count", "1"))[0]["act"] == "rolled_back"
    assert json.loads(run("list", "--json"))["version"] == 5


# --- the shelf ---


def test_changes_of_many_are_all_made_one_after_the_other() -> None:
    state = MemoryState()
    shelf_of(state)
    holds = [60.0 * k for k in range(1, 9)]
    threads = [threading.Thread(target=WindowShelf(state).pin, args=("busy", Window(0.0, 0.0, hold), "x", hold)) for hold in holds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book, record = WindowShelf(state).read()
    events = WindowShelf(state).events()
    assert book.version == 2 + len(holds)
    assert sorted(event.version for event in events) == list(range(1, 3 + len(holds)))
    assert [int(each["version"]) for each in record.before] == list(range(2 + len(holds)))


def test_a_record_that_is_none_is_said_and_changes_nothing_that_is_in_force() -> None:
    state = MemoryState()
    shelf = shelf_of(state)
    view = WindowView(state)
    assert view.look()
    assert not view.look()
    before = view.book
    state.write({WINDOWS: b'{"book": {"version": -1}}'})
    assert not view.look()
    assert view.book == before
    with pytest.raises(InputError, match="remove the key"):
        shelf.pin("busy", None, "", 1.0)
    state.append(WINDOW_EVENTS, [b"nonsense"], 10)
    assert [event.act for event in shelf.events()] == ["tuned", "segments"]


def test_a_store_that_is_away_is_told_from_a_fault() -> None:
    class Busy(MemoryState):
        def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
            return False

    state = Busy()
    with pytest.raises(UnavailableError, match="others change"):
        WindowShelf(state).change(lambda book, _: (book, [], None))
    with pytest.raises(UsageError, match="no segment"):
        WindowShelf(MemoryState()).pin("busy", None, "", 1.0)


def test_models_without_history_have_facts_of_their_own() -> None:
    state = MemoryState()
    shelf_of(state)
    state.write({WINDOW_FACTS: records.encode({"chat": (100.0, 0.9, 0.0)})})
    view = WindowView(state)
    view.look()
    table = view.facts([("chat", 5e9), ("new", 7e9)])
    assert table.bytes.tolist() == [5e9, 7e9]
    assert table.rows_per_day.tolist() == [100.0, 0.0]
    assert view.book.windows_of(table).hold_s.tolist() == [120.0, 600.0]
    assert not view.is_plain
    assert WindowView(MemoryState()).is_plain


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["pin", "unpin", "tune", "back", "back_to"]), max_size=12), st.data())
def test_whatever_is_done_versions_rise_and_any_version_that_is_kept_can_be_gone_back_to(acts: list[str], data: st.DataObject) -> None:
    state = MemoryState()
    shelf = shelf_of(state)
    for k, act in enumerate(acts):
        before = shelf.read()[0]
        try:
            match act:
                case "pin":
                    shelf.pin("busy", Window(0.0, 0.0, data.draw(st.sampled_from([60.0, 120.0, 600.0]))), "", float(k))
                case "unpin":
                    shelf.unpin("busy", "", float(k))
                case "tune" if len(before.entries) == 2:
                    window = replace(DEFAULT_WINDOW, hold_s=1200.0 + k)
                    at_s = float(k)
                    shelf.change(lambda book, _, window=window, at_s=at_s: (book.changed("rare", window, at_s, ""), [], at_s))  # type: ignore[misc]
                case "tune":
                    continue
                case "back":
                    shelf.roll_back(None, "", float(k))
                case _:
                    shelf.roll_back(data.draw(st.integers(0, before.version + 1)), "", float(k))
        except UsageError:
            assert shelf.read()[0] == before
        after, record = shelf.read()
        assert after.version in (before.version, before.version + 1)
        assert len({int(each["version"]) for each in record.before}) == len(record.before)
        for entry in before.entries:
            if entry.pinned and act in ("back", "back_to"):
                kept = after.entry(entry.segment.name)
                assert (kept.window, kept.pinned) == (entry.window, True)
