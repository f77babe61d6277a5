"""Who leads: one of several, another once that one is gone, and nobody whose lease was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually

from prefetcher.clock import SystemClock
from prefetcher.controller import leadership, records
from prefetcher.controller.leadership import Leadership
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LEASE_S", 1.2)
    monkeypatch.setattr(leadership, "_RENEW_S", 0.1)


@pytest.fixture(params=["memory", "server"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    if request.param == "memory":
        yield MemoryState(SystemClock())
        return
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    made = RedisState(server.url)
    yield made
    made.close()
    server.stop()



class Candidate:
    """Takes part, and notes the fence of every term; a term lasts until it is over or `end` is called."""

    def __init__(self, state: StateStore, holder: str) -> None:
        self.leadership = Leadership(state, SystemClock(), holder)
        self.terms: list[int] = []
        self.over: list[int] = []
        self.moves = True
        self._stop = threading.Event()
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self.leadership.run, args=(self._stop, self._lead, lambda: self.moves))
        self._thread.start()

    def _lead(self, fence: int, over: threading.Event) -> None:
        self.terms.append(fence)
        while not over.wait(0.01) and not self._give_up.is_set():
            pass
        self._give_up.clear()
        self.over.append(fence)

    @property
    def leads(self) -> bool:
        return self.leadership.leads and len(self.terms) > len(self.over)

    def end_term(self) -> None:
        self._give_up.set()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def candidates(state: StateStore) -> Iterator[Callable[[str], Candidate]]:
    made: list[Candidate] = []

    def make(holder: str, of: StateStore | None = None) -> Candidate:
        made.append(Candidate(of or state, holder))
        return made[-1]

    yield make
    for candidate in made:
        candidate.end()


Make = Callable[..., Candidate]


def test_one_leads_and_the_other_stands_by_until_it_is_handed_the_lease(candidates: Make) -> None:
    first = candidates("first")
    eventually(lambda: first.leads)
    second = candidates("second")
    threading.Event().wait(2 * leadership.LEASE_S)
    assert (first.leads, second.leads, second.terms) == (True, False, [])
    first.end()
    eventually(lambda: second.leads)
    assert second.terms[0] > first.terms[0]
    assert first.over == first.terms


def test_a_leader_that_vanished_is_followed_when_its_lease_ends(candidates: Make, state: StateStore) -> None:
    assert state.take_lease(records.LEASE, "vanished", leadership.LEASE_S)
    fence = state.next_number(records.EPOCH)
    second = candidates("second")
    eventually(lambda: second.leads)
    assert second.terms == [fence + 1]


def test_the_same_name_takes_its_own_lease_over_at_once_with_a_new_number(candidates: Make, state: StateStore) -> None:
    assert state.take_lease(records.LEASE, "node-0", 3_600.0)
    fence = state.next_number(records.EPOCH)
    again = candidates("node-0")
    eventually(lambda: again.leads)
    assert again.terms == [fence + 1]


def test_a_lease_that_somebody_else_has_ends_the_term(candidates: Make, state: StateStore) -> None:
    first = candidates("first")
    eventually(lambda: first.leads)
    state.delete([records.LEASE])
    # Between two renewals it may be the first one's again: then somebody else was not fast enough.
    eventually(lambda: state.take_lease(records.LEASE, "other", 3_600.0) or state.delete([records.LEASE]))
    eventually(lambda: first.over == first.terms)
    assert not first.leads


def test_a_leader_whose_loop_stands_loses_the_lease_and_its_term(candidates: Make) -> None:
    first = candidates("first")
    eventually(lambda: first.leads)
    second = candidates("second")
    first.moves = False
    eventually(lambda: second.leads)
    assert second.terms[0] > first.terms[0]
    # It notices as soon as it moves again, and does not lead beside the other.
    first.moves = True
    eventually(lambda: first.over == first.terms)
    assert second.leads


def test_a_term_that_ended_by_itself_is_followed_by_another_with_a_higher_number(candidates: Make) -> None:
    first = candidates("first")
    eventually(lambda: first.leads)
    first.end_term()
    eventually(lambda: len(first.terms) == 2 and first.leads)
    assert first.terms[1] > first.terms[0]


class Away(MemoryState):
    """A store that nobody answers for while `away`."""

    away = False

    def take_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        if self.away:
            raise UnavailableError("away")
        return super().take_lease(key, holder, ttl_s)

    def drop_lease(self, key: str, holder: str) -> None:
        if self.away:
            raise UnavailableError("away")
        super().drop_lease(key, holder)


def test_a_store_that_is_away_for_less_than_a_lease_ends_no_term(candidates: Make) -> None:
    store = Away(SystemClock())
    first = candidates("first", store)
    eventually(lambda: first.leads)
    store.away = True
    threading.Event().wait(3 * leadership._RENEW_S)
    store.away = False
    threading.Event().wait(3 * leadership._RENEW_S)
    assert (first.leads, len(first.terms)) == (True, 1)


def test_a_store_that_is_away_for_longer_ends_the_term_and_the_next_begins_when_it_is_back(candidates: Make) -> None:
    store = Away(SystemClock())
    first = candidates("first", store)
    eventually(lambda: first.leads)
    store.away = True
    eventually(lambda: first.over)
    assert not first.leads
    store.away = False
    eventually(lambda: first.leads and len(first.terms) == 2)
    assert first.terms[1] > first.terms[0]
