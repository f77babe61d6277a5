"""The windows in force, as versioned records in the state store: every change is an event with its evidence, and any can be undone.

One record holds the book of now and the books before it, so that going back needs nothing else; whoever changes it (the job that tunes, an
operator at any endpoint, the watch that undoes a bad change) compares and swaps. Versions only rise: going back makes a new version with an
older book's windows. Covers no tuning (`batch.tuning`, `core.tuner`) and no plans (`controller.planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.types import Window
from prefetcher.core.windows import BookEntry, FactTable, ModelFacts, WindowBook, check_window, window_in_words
from prefetcher.errors import InputError, UnavailableError, UsageError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["EVENTS_KEPT", "WINDOWS", "WINDOW_EVENTS", "WINDOW_FACTS", "BooksRecord", "WindowEvent", "WindowShelf", "WindowView"]

WINDOWS = "prefetcher:{controller}:windows"
WINDOW_EVENTS = "prefetcher:{controller}:window-events"
WINDOW_FACTS = "prefetcher:{controller}:window-facts"
#: Books that can be gone back to, and events that are told; a change a day fills them in a season and in three years.
_BOOKS_KEPT = 90
_REMOVE = f"remove the key {WINDOWS}: the last windows that could be read are put back, or the default ones where no process knows any"
EVENTS_KEPT = 1_000
_TRIES = 50


class BooksRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is written under `windows`: the book in force, as `WindowBook.to_json`, and the ones before it, oldest first. `watched_from_s`:
    when the change was made that the watch looks at, None where there is none."""

    book: Any
    before: tuple[Any, ...] = ()
    watched_from_s: float | None = None


class WindowEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened to windows. `act`: `tuned`, `segments`, `pinned`, `unpinned`, `rolled_back`, or `undone` (by the watch).

    `version` is the book's after it, `segment` '' where it is the whole book. `evidence`: costs before and after, the alternatives, rows
    and the time that they are of.
    """

    at_s: float
    act: str
    by: str
    version: int
    segment: str = ""
    old: dict[str, float] | None = None
    new: dict[str, float] | None = None
    why: str = ""
    evidence: dict[str, Any] | None = None


_books = msgspec.json.Decoder(BooksRecord)
_events = msgspec.json.Decoder(WindowEvent)
_facts = msgspec.json.Decoder(dict[str, tuple[float, float, float]])


def window_json(window: Window) -> dict[str, float]:
    """A window as JSON types."""
    return {"lead_s": window.lead_s, "horizon_s": window.horizon_s, "hold_s": window.hold_s}


def _decoded(raw: bytes | None) -> tuple[BooksRecord, WindowBook]:
    """Raises ValueError or InputError for what is none."""
    if raw is None:
        book = WindowBook()
        return BooksRecord(book.to_json()), book
    record = records.decode(raw, _books)
    book = WindowBook.from_json(record.book)
    # An earlier book that is none can't be gone back to; that is no reason to lose the one in force.
    return msgspec.structs.replace(record, before=tuple(each for each in record.before if _is_book(each))), book


def _is_book(said: Any) -> bool:
    try:
        WindowBook.from_json(said)
    except InputError:
        return False
    return True


class WindowShelf:
    """Reads and changes the windows; for threads."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    def read(self) -> tuple[WindowBook, BooksRecord]:
        """The book in force, and its record.

        Raises:
            UnavailableError: the state store does not answer.
            InputError: what is there is no book.
        """
        return self._of(self._state.read(WINDOWS))

    def _of(self, raw: bytes | None) -> tuple[WindowBook, BooksRecord]:
        try:
            record, book = _decoded(raw)
        except (ValueError, InputError) as exc:
            raise InputError(f"{exc}; {_REMOVE}") from exc
        return book, record

    def events(self, count: int = EVENTS_KEPT) -> list[WindowEvent]:
        """The last events, newest first; what can't be read is left out.

        Raises:
            UnavailableError: the state store does not answer.
        """
        found = []
        for raw in self._state.tail(WINDOW_EVENTS, count):
            try:
                found.append(records.decode(raw, _events))
            except ValueError as exc:
                log().error("window_event_unreadable", reason=str(exc), then="it is left out")
        return found[::-1]

    def change(self, make: Callable[[WindowBook, BooksRecord], tuple[WindowBook, list[WindowEvent], float | None] | None]) -> WindowBook:
        """Puts what `make(book, record)` gives (the next book, its events, and since when it is watched) in the place of what is there, or
        leaves it for None. `make` is called again when somebody else was faster.

        Raises:
            UnavailableError: the state store does not answer, or others change it all the time.
            InputError: what is there is no book.
        """
        for _ in range(_TRIES):
            raw = self._state.read(WINDOWS)
            book, record = self._of(raw)
            made = make(book, record)
            if made is None:
                return book
            after, events, watched_from_s = made
            after = replace(after, version=book.version + 1)
            kept = (*record.before, record.book)[-_BOOKS_KEPT:]
            if self._state.replace(WINDOWS, raw, records.encode(BooksRecord(after.to_json(), kept, watched_from_s))):
                numbered = [msgspec.structs.replace(event, version=after.version) for event in events]
                self._state.append(WINDOW_EVENTS, [records.encode(event) for event in numbered], EVENTS_KEPT)
                for event in numbered:
                    log().info("windows_changed", act=event.act, segment=event.segment, by=event.by, version=event.version, why=event.why)
                return after
        raise UnavailableError("others change the windows all the time; try again", retry_after_s=1.0)

    def stop_watching(self, since_s: float) -> None:
        """The change that has been watched since `since_s` stood. Raises UnavailableError."""
        raw = self._state.read(WINDOWS)
        _, record = self._of(raw)
        if record.watched_from_s == since_s:
            # Whoever is faster changed more than this.
            self._state.replace(WINDOWS, raw, records.encode(msgspec.structs.replace(record, watched_from_s=None)))

    # --- by people ---

    def pin(self, segment: str, window: Window | None, by: str, now_s: float) -> WindowBook:
        """The segment keeps its window, or gets another one and keeps that, whatever the tuner finds.

        Raises:
            UsageError: there is no such segment, or a window that can't be.
            UnavailableError: the state store does not answer.
        """
        if window is not None:
            try:
                check_window(window)
            except ValueError as exc:
                raise UsageError(str(exc)) from exc

        def make(book: WindowBook, record: BooksRecord) -> tuple[WindowBook, list[WindowEvent], float | None] | None:
            old = _entry(book, segment)
            new = old.window if window is None else window
            if old.pinned and old.window == new:
                return None
            why = f"pinned by {by}" if by else "pinned by hand"
            event = WindowEvent(now_s, "pinned", by, 0, segment, window_json(old.window), window_json(new), why)
            return book.changed(segment, new, now_s, why, pinned=True), [event], _watch_goes_on(record, old, new)

        return self.change(make)

    def unpin(self, segment: str, by: str, now_s: float) -> WindowBook:
        """The tuner may change the segment again. Raises UsageError, UnavailableError."""

        def make(book: WindowBook, record: BooksRecord) -> tuple[WindowBook, list[WindowEvent], float | None] | None:
            old = _entry(book, segment)
            if not old.pinned:
                return None
            why = f"unpinned by {by}" if by else "unpinned by hand"
            event = WindowEvent(now_s, "unpinned", by, 0, segment, window_json(old.window), window_json(old.window), why)
            return book.changed(segment, old.window, now_s, why, pinned=False), [event], record.watched_from_s

        return self.change(make)

    def roll_back(self, version: int | None, by: str, now_s: float, why: str = "", act: str = "rolled_back", **more: Any) -> WindowBook:
        """The windows of an earlier version, without one the last before now, are in force again; what was pinned meanwhile stays pinned.

        Raises:
            UsageError: there is no such version, or none before.
            UnavailableError: the state store does not answer.
        """

        def make(book: WindowBook, record: BooksRecord) -> tuple[WindowBook, list[WindowEvent], float | None] | None:
            known = {int(each["version"]): each for each in record.before}
            wanted = _last_other(book, record.before) if version is None else version
            if wanted is None or wanted not in known:
                named = ", ".join(map(str, sorted(known)[-10:])) or "none"
                what = "nothing to go back to" if wanted is None else f"no version {wanted} is kept"
                raise UsageError(f"{what}; now is version {book.version}, before it were {named}")
            older = WindowBook.from_json(known[wanted])
            said = why or f"back to version {wanted}"
            pinned = {entry.segment.name: entry for entry in book.entries if entry.pinned}
            entries = tuple(
                (pinned.pop(entry.segment.name) if entry.segment.name in pinned else None)
                or replace(entry, since_s=now_s, why=said, pinned=False)
                for entry in older.entries
            )
            # A pinned segment that the older book does not know still comes before those that hold its models there.
            entries = (*pinned.values(), *entries)
            events = _differences(book, replace(older, entries=entries), now_s, act, by, said, more.get("evidence"))
            return replace(older, entries=entries), events, None

        return self.change(make)


def _entry(book: WindowBook, segment: str) -> BookEntry:
    try:
        return book.entry(segment)
    except KeyError as exc:
        raise UsageError(str(exc.args[0])) from exc


def _watch_goes_on(record: BooksRecord, old: BookEntry, new: Window) -> float | None:
    return record.watched_from_s if old.window == new else None


def _last_other(book: WindowBook, before: Sequence[Mapping[str, Any]]) -> int | None:
    """The newest version before whose windows are others than those of now."""
    now = _windows_of(book)
    for each in reversed(before):
        if _windows_of(WindowBook.from_json(each)) != now:
            return int(each["version"])
    return None


def _windows_of(book: WindowBook) -> tuple[Any, ...]:
    return (*((entry.segment, entry.window) for entry in book.entries), book.rest)


def _differences(
    book: WindowBook, after: WindowBook, now_s: float, act: str, by: str, why: str, evidence: dict[str, Any] | None
) -> list[WindowEvent]:
    """An event for each segment that got another window; one of the whole book where segments came or went, or nothing differs."""
    old = {entry.segment: entry.window for entry in book.entries}
    new = {entry.segment: entry.window for entry in after.entries}
    changed = [segment for segment in new if segment in old and old[segment] != new[segment]]
    if old.keys() != new.keys() or not changed:
        return [WindowEvent(now_s, act, by, 0, why=why, evidence=evidence)]
    return [
        WindowEvent(now_s, act, by, 0, s.name, window_json(old[s]), window_json(new[s]), f"{why}: {window_in_words(new[s])}", evidence)
        for s in changed
    ]


class WindowView:
    """What one process knows of windows and of models' facts, and what can't be read of them (`problem`); for one thread. `logs`: the log
    says so too, once."""

    def __init__(self, state: StateStore, *, logs: bool = True) -> None:
        self._state = state
        self._logs = logs
        self._remembered = Remembered(state)
        self.problem = ""
        self._raw: list[bytes | None] = []
        self._facts: dict[str, tuple[float, float, float]] = {}
        self.book = WindowBook()

    def look(self) -> bool:
        """Reads the records, and whether they are others than before; while one can't be read, its last value stands.

        Raises:
            UnavailableError: the state store does not answer.
        """
        keys = [WINDOWS, WINDOW_FACTS]
        found = self._remembered.look(keys, self._state.read_many(keys))
        if found == self._raw:
            return False
        book, facts, problems = self.book, self._facts, []
        try:
            _, book = _decoded(found[0])
        except (ValueError, InputError) as exc:
            self._remembered.refuse(WINDOWS)
            problems.append(f"{exc}; {_REMOVE}")
        try:
            facts = {} if found[1] is None else records.decode(found[1], _facts)
        except ValueError as exc:
            self._remembered.refuse(WINDOW_FACTS)
            problems.append(f"facts of models: {exc}; the next run of tune-windows writes them anew")
        problem = "; ".join(problems)
        if problem and problem != self.problem and self._logs:
            log().error("windows_unreadable", reason=problem, then="the last ones stand")
        changed = (book, facts) != (self.book, self._facts)
        # What can't be read is looked at again, so that its removal does not bring it back.
        self._raw = [] if problem else found
        self.problem, self.book, self._facts = problem, book, facts
        return changed or not problem

    @property
    def is_plain(self) -> bool:
        """Whether no model has another window than the deciding expert gives it."""
        windows = {self.book.rest, *(entry.window for entry in self.book.entries)}
        return windows == {WindowBook().rest}

    def facts(self, models: Iterable[tuple[str, float]]) -> FactTable:
        """The facts of (model, bytes); of a model without history, that it is never asked for."""
        nothing = (0.0, 0.0, 0.0)
        return FactTable.of([ModelFacts(size, *self._facts.get(model, nothing)) for model, size in models])
