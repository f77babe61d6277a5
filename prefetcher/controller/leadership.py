"""Which of several controllers leads: a lease in the state store, renewed while its holder moves, with a fencing number for every term.

A term begins with a number above all earlier ones, which agents and the store hold against whoever led before; so even a holder that slept
through the end of its lease changes nothing any more. Covers no planning: `lead` is what a leader does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["LEASE_S", "Leadership"]

#: A leader that is gone is followed after this long. Three renewals may fail before: a store that restarts takes a second or two.
LEASE_S = 6.0
_RENEW_S = LEASE_S / 4.0


class Leadership:
    """Takes part in the election under the name `holder`; the same name takes its own lease over at once.

    `moves()` says whether the leader's own loop is alive: the lease of one that hangs is left to end.
    """

    def __init__(self, state: StateStore, clock: Clock, holder: str) -> None:
        self._state = state
        self._clock = clock
        self._holder = holder
        self.leads = False

    def run(self, stop: threading.Event, lead: Callable[[int, threading.Event], None], moves: Callable[[], bool] = lambda: True) -> None:
        """Until `stop`: waits for the lease, calls `lead(fence, over)` for a term, and again. `over` is set when the term must end."""
        waiting = False
        while not stop.is_set():
            try:
                got = self._state.take_lease(records.LEASE, self._holder, LEASE_S)
                fence = self._state.next_number(records.EPOCH) if got else 0
            except UnavailableError as exc:
                log().warning("leadership_unknown", reason=str(exc), then="asking again")
                got, fence = False, 0
            if not got:
                if not waiting:
                    log().info("standing_by", holder=self._holder)
                waiting = True
                stop.wait(_RENEW_S)
                continue
            waiting = False
            self._term(stop, fence, lead, moves)

    def _term(
        self, stop: threading.Event, fence: int, lead: Callable[[int, threading.Event], None], moves: Callable[[], bool]
    ) -> None:
        over = threading.Event()
        self.leads = True
        log().info("leading", holder=self._holder, fence=fence)
        renewing = threading.Thread(target=self._renew, args=(stop, over, moves), name="lease", daemon=True)
        renewing.start()
        try:
            lead(fence, over)
        finally:
            over.set()
            renewing.join()
            self.leads = False
            log().info("leads_no_more", holder=self._holder, fence=fence)
        try:
            # Handed back at once, so that a standby need not wait for its end.
            self._state.drop_lease(records.LEASE, self._holder)
        except UnavailableError as exc:
            log().warning("lease_not_dropped", reason=str(exc), then=f"it ends by itself in {LEASE_S:.0f} s")

    def _renew(self, stop: threading.Event, over: threading.Event, moves: Callable[[], bool]) -> None:
        """Keeps the lease while the term lasts; ends the term when it is lost or could not be renewed for as long as it lasts."""
        renewed_s = self._real_s()
        while not over.wait(_RENEW_S):
            if stop.is_set():
                over.set()
            elif moves():
                try:
                    if not self._state.take_lease(records.LEASE, self._holder, LEASE_S):
                        log().error("lease_lost", holder=self._holder)
                        over.set()
                    renewed_s = self._real_s()
                except UnavailableError:
                    if self._real_s() - renewed_s > LEASE_S:
                        # Others may lead by now; the fence would refuse what is written, and there is nowhere to write it.
                        over.set()

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed
