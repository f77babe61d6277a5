"""The agent's link with the state store: one thread that reads plans from there and writes there what the agent's loop hands it.

The loop never waits for the store. What it hands over was made in the loop, so that what belongs together is of one instant: the report, of
which the latest wins, and now and then what outlives the process (`agent.kept`), one at a time. Covers neither what is in them nor acts by
hand, which reach the loop directly and are written by whoever answers for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prefetcher.agent.kept import Snapshot
from prefetcher.agent.name_lease import NameLease
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.types import NodeName
from prefetcher.errors import TemporaryError, UnavailableError
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

    `on_plan(raw)` is told of every plan that was read and differs from the last, `on_switch(switch)` of what the switches of this node say
    together, when that changes; `on_kept(snapshot, written)` once of every snapshot but the one that `close` gets, and `on_died(error)`
    when the link fails for another reason than a store that is away. `tell(snapshot, last)` sends outcomes on, before they count as told.
    """

    def __init__(
        self,
        state: StateStore,
        node: NodeName,
        clock: Clock,
        on_plan: Callable[[bytes], None],
        on_kept: Callable[[Snapshot, bool], None],
        on_died: Callable[[BaseException], None],
        on_switch: Callable[[records.Switch], None],
        tell: Callable[[Snapshot, bool], None],
        group: str,
        lease: NameLease,
    ) -> None:
        self._state = state
        self._lease = lease
        self._remembered = Remembered(state)
        self._node = node
        self._clock = clock
        self._on_plan = on_plan
        self._on_kept = on_kept
        self._on_died = on_died
        self._on_switch = on_switch
        self._tell = tell
        self._by_hand = [records.SWITCH, records.group_key(group, "switch"), records.node_key(node, "switch"), records.PINS]
        self._looked_at = [records.node_key(node, "plan"), *self._by_hand]
        self._seen_at_s = self._renewed_s = float("-inf")
        self._switch_problem = ""
        self._mode: str | None = None
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
            if not self._lease.lost:
                self._state.delete([records.node_key(self._node, "report")])
            self._lease.drop()

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

    def _try(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except TemporaryError as exc:
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
            is_ours = self._renew()
            self._look(is_ours)
            if not is_ours:
                return
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

    def _renew(self) -> bool:
        """Whether this node's name is still this process's: plans under it are then for it, and what it writes is read as its own."""
        if self._real_s() - self._renewed_s >= _LOOK_S or self._lease.lost:
            self._lease.renew()
            self._renewed_s = self._real_s()
        return not self._lease.lost

    def _look(self, is_ours: bool) -> None:
        raw, *by_hand = self._state.read_many(self._looked_at)
        *switches, _ = self._remembered.look(self._by_hand, by_hand)
        self._take_switch(switches)
        if not is_ours:
            return
        if raw is None and self._plan is not None:
            # A store that forgot the plan forgot also that there is such a node.
            self._plan, self._seen_at_s = None, float("-inf")
        if raw is not None and raw != self._plan:
            self._plan = raw
            self._on_plan(raw)
        if self._real_s() - self._seen_at_s > records.SEEN_EVERY_S:
            self._state.see(records.NODES, self._node, self._clock.now_s())
            self._seen_at_s = self._real_s()

    def _take_switch(self, switches: Sequence[bytes | None]) -> None:
        try:
            switch = records.strictest(switches)
        except ValueError as exc:
            if str(exc) != self._switch_problem:
                log().error("switch_unreadable", reason=str(exc), then="the last one stands; set it again with `prefetcher on` or `off`")
            self._switch_problem = str(exc)
            return
        self._switch_problem = ""
        if switch.mode != self._mode:
            self._mode = switch.mode
            self._on_switch(switch)

    def _write(self, snapshot: Snapshot, last: bool = False) -> None:
        self._state.write(snapshot.items)
        self._tell(snapshot, last)
        shown = snapshot.shown(self._node)
        if shown:
            self._state.write(shown, expire_s=records.SUMS_EXPIRE_S)
        orders = [records.encode(order) for order in snapshot.untold]
        self._state.append(records.node_key(self._node, "orders"), orders, records.ORDERS_KEPT)

    def _write_last(self) -> None:
        if self._last is not None and not self._lease.lost:
            self._write(self._last, last=True)
        self._last_written = True
