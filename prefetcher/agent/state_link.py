"""The agent's link with the state store: one thread that reads plans from there and writes there what the agent's loop hands it.

The loop never waits for the store. What it hands over was made in the loop, so that what belongs together is of one instant: the report, of
which the latest wins, and now and then what outlives the process (`agent.kept`), one at a time. Covers neither what is in them nor acts by
hand, which reach the loop directly and are written by whoever answers for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefetcher.agent.kept import Snapshot
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["StateLink"]

#: Real seconds between looks for a plan that nobody announced, and between tries while the store is away.
_LOOK_S = 1.0
#: Real seconds that the last snapshot may take: a server that is started again needs a few, and whoever ends the agent waits for it.
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the node looks like: it expires, or the next one replaces it."""

    report: Mapping[str, bytes]
    totals: Mapping[str, bytes]


class StateLink:
    """`start` it, hand it what is to be written, `close` it. Methods are safe for threads; the callbacks come in the link's thread.

    `on_plan(raw)` is told of every plan that was read and differs from the last, `on_kept(snapshot, written)` once of every snapshot but
    the one that `close` gets, and `on_died(error)` when the link fails for another reason than a store that is away.
    """

    def __init__(
        self,
        state: StateStore,
        node: NodeName,
        clock: Clock,
        on_plan: Callable[[bytes], None],
        on_kept: Callable[[Snapshot, bool], None],
        on_died: Callable[[BaseException], None],
    ) -> None:
        self._state = state
        self._node = node
        self._clock = clock
        self._on_plan = on_plan
        self._on_kept = on_kept
        self._on_died = on_died
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._shown: _Shown | None = None
        self._snapshot: Snapshot | None = None
        self._last: Snapshot | None = None
        self._last_written = False
        self._end_s = float("inf")
        self._given_up = False
        self._plan: bytes | None = None
        self._thread: threading.Thread | None = None
        #: Whether a try failed and no report was written since.
        self.away = False

    def start(self) -> None:
        # A store that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run_or_end, name="state", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """There may be a new plan."""
        self._wake.set()

    def show(self, report: bytes, totals: bytes | None) -> None:
        """Writes the report, in the place of any that is still to be written. `totals` adds nothing to the last snapshot but time."""
        key = records.node_key(self._node, "totals")
        with self._guard:
            self._shown = _Shown({records.node_key(self._node, "report"): report}, {} if totals is None else {key: totals})
        self._wake.set()

    def keep(self, snapshot: Snapshot) -> None:
        """Writes a snapshot, then the orders that it has to tell; `on_kept` says whether that went well. The next one only after that."""
        with self._guard:
            self._snapshot = snapshot
        self._wake.set()

    def close(self, last: Snapshot | None) -> bool:
        """Writes the `last` snapshot and takes the report away, within 10 s; whether the snapshot is written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._last, self._end_s = last, self._real_s() + _CLOSE_S
            self._stop.set()
            self._wake.set()
            thread.join(_CLOSE_S)
            self._given_up = thread.is_alive()
        return last is None or self._last_written

    # --- the link's thread ---

    def _run_or_end(self) -> None:
        try:
            self._run()
        except BaseException as exc:
            # Whoever closed the link closes the store next, under a call that still hangs.
            if self._given_up:
                return
            self._on_died(exc)
            raise

    def _run(self) -> None:
        while not self._stop.is_set():
            self._clock.wait(self._wake, _LOOK_S * self._clock.speed)
            self._wake.clear()
            if not self._stop.is_set() and not self._try(self._exchange):
                self._clock.wait(self._stop, _LOOK_S * self._clock.speed)
        never = threading.Event()
        while not self._try(self._write_last) and self._real_s() < self._end_s:
            self._clock.wait(never, 0.2 * self._clock.speed)
        # What can't be taken away expires.
        with contextlib.suppress(UnavailableError):
            self._state.delete([records.node_key(self._node, "report")])

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

    def _try(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except UnavailableError as exc:
            if not self.away:
                log().warning("state_away", reason=str(exc), then="the last plan and the agent's own timers go on")
            self.away = True
            return False
        return True

    def _exchange(self) -> None:
        """Does all that is to be done. What fails is not tried again: the loop has something newer by then."""
        with self._guard:
            shown, self._shown = self._shown, None
            snapshot, self._snapshot = self._snapshot, None
        written = False
        try:
            self._read_plan()
            if shown is not None:
                # Before the snapshot, which brings newer totals.
                self._state.write(shown.report, expire_s=records.REPORT_EXPIRES_S)
                if shown.totals:
                    self._state.write(shown.totals)
            if snapshot is not None:
                self._write(snapshot)
            written = True
            if self.away and shown is not None:
                log().info("state_back")
                self.away = False
        finally:
            if snapshot is not None:
                self._on_kept(snapshot, written)

    def _read_plan(self) -> None:
        raw = self._state.read(records.node_key(self._node, "plan"))
        if raw is not None and raw != self._plan:
            self._plan = raw
            self._on_plan(raw)

    def _write(self, snapshot: Snapshot) -> None:
        self._state.write(snapshot.items)
        orders = [records.encode(order) for order in snapshot.untold]
        self._state.append(records.node_key(self._node, "orders"), orders, records.ORDERS_KEPT)

    def _write_last(self) -> None:
        if self._last is not None:
            self._write(self._last)
        self._last_written = True
