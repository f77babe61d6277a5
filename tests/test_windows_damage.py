"""Windows records that somebody damaged: what stands, what is said, and that the way out which errors name leads out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog.testing

from prefetcher.controller import records
from prefetcher.controller.experiment import EXPERIMENT, ExperimentView
from prefetcher.controller.windows import WINDOW_FACTS, WINDOWS, BooksRecord, WindowShelf, WindowView
from prefetcher.core.types import Window
from prefetcher.core.windows import BookEntry, Segment, WindowBook
from prefetcher.errors import InputError, UsageError
from prefetcher_connectors.memory import MemoryState

BOOK = WindowBook((BookEntry(Segment("busy", (("rows_per_day", 24.0, 1e9),)), Window(300.0, 900.0, 60.0)),), version=3)
GOOD = records.encode(BooksRecord(BOOK.to_json(), (WindowBook().to_json(),)))
JUNK = [b"junk", b"null", b"\xff", b"[" * 100_000, b'{"book": {"version": -1}}', GOOD.replace(b'"since_s":0.0', b'"since_s":1e300')]


def _remove(state: MemoryState, key: str) -> None:
    del state._values[key]


@pytest.mark.parametrize("junk", JUNK)
def test_a_damaged_record_that_is_removed_is_not_put_back_but_the_last_good_one(junk: bytes) -> None:
    state = MemoryState()
    state.write({WINDOWS: GOOD})
    knows, knows_nothing = WindowView(state), WindowView(state)
    knows.look()
    state.write({WINDOWS: junk})
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            knows.look()
            knows_nothing.look()
    assert [e["event"] for e in logged] == ["windows_unreadable"] * 2
    assert (knows.book, knows_nothing.book) == (BOOK, WindowBook())
    with pytest.raises(InputError, match="remove the key"):
        WindowShelf(state).read()
    _remove(state, WINDOWS)
    knows_nothing.look()
    assert state.read(WINDOWS) is None
    knows.look()
    assert state.read(WINDOWS) == GOOD
    knows_nothing.look()
    assert knows.book == knows_nothing.book == WindowShelf(state).read()[0] == BOOK


def test_damaged_facts_leave_windows_that_people_set_in_force() -> None:
    state = MemoryState()
    state.write({WINDOWS: GOOD, WINDOW_FACTS: records.encode({"chat": (100.0, 0.9, 0.0)})})
    view = WindowView(state)
    view.look()
    state.write({WINDOW_FACTS: b"junk"})
    WindowShelf(state).pin("busy", Window(300.0, 900.0, 45.0), "ops", 5.0)
    with structlog.testing.capture_logs() as logged:
        assert view.look()
        assert not view.look()
    assert [e["event"] for e in logged] == ["windows_unreadable"]
    assert view.book.windows_of(view.facts([("chat", 1.0)])).hold_s.tolist() == [45.0]
    state.write({WINDOW_FACTS: records.encode({"chat": (1.0, 0.9, 0.0)})})
    assert view.look()
    assert view.problem == ""
    assert view.book.windows_of(view.facts([("chat", 1.0)])).hold_s.tolist() == [600.0]


@pytest.mark.parametrize("earlier", [1, "x", None, {}, {"version": "abc"}, {"version": 1}, {"version": 1, "segments": 5, "rest": {}}])
def test_an_earlier_book_that_is_none_costs_itself_alone(earlier: Any) -> None:
    state = MemoryState()
    record = json.loads(GOOD)
    record["before"].insert(0, earlier)
    state.write({WINDOWS: json.dumps(record).encode()})
    shelf = WindowShelf(state)
    book, found = shelf.read()
    assert book == BOOK
    assert [each["version"] for each in found.before] == [0]
    with pytest.raises(UsageError, match="no version 1 is kept"):
        shelf.roll_back(1, "ops", 9.0)
    assert shelf.roll_back(None, "ops", 9.0).entries == ()


def test_a_damaged_experiment_that_is_removed_is_not_put_back() -> None:
    state = MemoryState()
    state.write({EXPERIMENT: b"junk"})
    view = ExperimentView(state)
    view.look()
    _remove(state, EXPERIMENT)
    view.look()
    assert state.read(EXPERIMENT) is None
