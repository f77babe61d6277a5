"""What the HTTP endpoint can do, without HTTP: takes requests in, and answers questions about nodes, orders and earnings.

Reads what agents and controllers wrote to the state store, and never their insides. Hints are `hints`, what people do is `by_hand`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from prefetcher.api.by_hand import ByHand, NodeByHand
from prefetcher.api.fleet import Fleet
from prefetcher.api.hints import HintDesk
from prefetcher.api.jobs import JobDesk, ScheduleDesk
from prefetcher.api.nodes import NodeDesk
from prefetcher.api.routing import RouteDesk
from prefetcher.clock import Clock, SystemClock
from prefetcher.config import ApiSettings, ReportSettings
from prefetcher.controller import records
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.errors import ModelNotFoundError, TemporaryError, UnavailableError, shortened
from prefetcher.ports import StateStore, StreamWriter, Topic
from prefetcher.report.desk import ReportDesk
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import request_records

if TYPE_CHECKING:
    from prefetcher.dashboard.past import Past

__all__ = ["ALL_NODES", "NodeByHand", "Service"]

#: What `node=` says for every node; no node can be called so.
ALL_NODES = "*"
_NODE_SEEN_S = 86_400.0
#: Real seconds from a post of rows to its answer, and the least that an append gets of them.
_ANSWER_S = 0.75
_LEAST_APPEND_S = 0.1
#: Posts of rows that wait for a log that takes nothing: each has one of the forty threads that all routes share.
_MOST_WAITING = 8
_RATIOS = ("accuracy", "timeliness")
_SETTLED_OTHERWISE = ("superseded", "cancelled", "open")


class Service:
    """The application as an endpoint sees it. Safe for threads; `close` it.

    `node` and its `own` are this process's, if it has one; `reach(node)` gives another. `wake(reason)` tells the controller that something
    happened; `check_controller` gives '' or what is wrong with it. `quick_state` is the same store for those who can't wait (`HintDesk`).
    `user_hash` makes of a user what may be written.
    """

    def __init__(
        self,
        node: NodeName | None,
        writer: StreamWriter,
        state: StateStore,
        own: NodeByHand | None,
        clock: Clock,
        metrics: Metrics,
        wake: Callable[[str], None],
        check_controller: Callable[[], str],
        *,
        settings: ApiSettings | None = None,
        group: str = "",
        reach: Callable[[NodeName], NodeByHand] | None = None,
        quick_state: StateStore | None = None,
        user_hash: Callable[[str], str] = lambda user: user,
    ) -> None:
        self.settings = settings or ApiSettings()
        self.node = node
        self.clock = clock
        self.metrics = metrics
        self.fleet = Fleet(quick_state or state, clock, node)
        self.hints = HintDesk(writer, quick_state or state, self.fleet, clock, self.settings.hints_in_flight, user_hash)
        self.by_hand = ByHand(node, group, own, reach, state, self.fleet, clock, metrics, wake)
        #: Jobs run by the machine's own clock.
        self.jobs = JobDesk(state, clock if clock.speed == 1.0 else SystemClock())
        self.reports = ReportDesk(state, clock, ReportSettings())
        self.nodes = NodeDesk(state, self.jobs, clock)
        self.schedules = ScheduleDesk(state, self.fleet, clock, wake)
        self.routes = RouteDesk(quick_state or state, self.fleet, clock)
        self._writer = writer
        self._state = state
        self._own = own
        self._wake = wake
        self._check_controller = check_controller
        self._user_hash = user_hash
        self._guard = threading.Lock()
        self._waiting = 0
        self._log_away = False
        #: '' or why nothing of a followed log can be read: it is no reason to start the process again.
        self.check_log: Callable[[], str] = lambda: ""
        #: '' or what people should know besides.
        self.note: Callable[[], str] = lambda: ""
        #: Requests and forecasts that were, where this process can read them.
        self.past: Past | None = None

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    @property
    def state(self) -> StateStore:
        """The store, for those who read records of all nodes."""
        return self._state

    @property
    def user_hash(self) -> Callable[[str], str]:
        return self._user_hash

    @user_hash.setter
    def user_hash(self, user_hash: Callable[[str], str]) -> None:
        self._user_hash = self.hints.user_hash = user_hash

    def take(self, requests: Sequence[RequestSeen], source: str, waited_s: float = 0.0) -> None:
        """Appends rows to the stream and returns once they are durable, within `_ANSWER_S` of their arrival, `waited_s` real seconds ago.

        Raises:
            NoRoomError: the log has no room.
            UnavailableError: no acknowledgement in time; the rows may still get there.
        """
        left_s = _ANSWER_S - waited_s
        with self._guard:
            if left_s < _LEAST_APPEND_S or (self._log_away and self._waiting >= _MOST_WAITING):
                raise UnavailableError("the request log took nothing in time; send the rows again, with the same ids they count once")
            self._waiting += 1
        try:
            self._append(requests, source, left_s)
            self._log_away = False
        except TemporaryError:
            self._log_away = True
            raise
        finally:
            with self._guard:
                self._waiting -= 1

    def _append(self, requests: Sequence[RequestSeen], source: str, timeout_s: float) -> None:
        hashed = [row if row.user is None else dataclasses.replace(row, user=self._user_hash(row.user)) for row in requests]
        self._writer.append(Topic.REQUESTS, request_records(hashed), timeout_s=timeout_s)
        self.metrics.requests.labels(source=source).inc(len(requests))
        self._wake("")

    # --- nodes ---

    def report(self, node: str | None = None) -> records.NodeReport:
        """The report of `node`, else of this process's own, else of the first that reports.

        Raises:
            ModelNotFoundError: no such node.
            UnavailableError: it does not report.
        """
        chosen = self._chosen(node) or next(iter(sorted(self.fleet.view().reports)), None)
        if chosen is None:
            raise UnavailableError("no node reports; start `prefetcher agent` on one", retry_after_s=1.0)
        raw = self._state.read(records.node_key(chosen, "report"))
        if raw is None:
            raise UnavailableError(f"node {chosen} has not reported for {records.REPORT_EXPIRES_S:.0f} s", retry_after_s=1.0)
        try:
            return records.decode_report(raw, chosen)
        except ValueError as exc:
            raise UnavailableError(f"the report of node {chosen} can't be read ({exc}); look after its agent", retry_after_s=1.0) from exc

    def _chosen(self, node: str | None) -> NodeName | None:
        if node is None:
            return self.node
        if node != self.node and node not in self._nodes():
            raise ModelNotFoundError(f"no node is called {shortened(repr(node))}; those that report are in /v1/status")
        return NodeName(node)

    def _nodes(self) -> list[NodeName]:
        """All that reported within a day."""
        seen = {NodeName(name) for name in self._state.members(records.NODES, self.now_s - _NODE_SEEN_S)}
        return sorted(seen | ({self.node} if self.node is not None else set()))

    def switched_on(self) -> bool:
        """Whether prefetching is not off for this process's own node."""
        return self.by_hand.mode() != "off"

    def totals(self, node: str | None = None) -> dict[str, Any]:
        """What a node's ledger adds up to (`docs/http.md` names the fields), empty before it was written first. Of all nodes: `nodes`, each
        by its name, and `sum`. Which node: as `orders`."""
        if node == ALL_NODES or (node is None and self.node is None):
            nodes = self._nodes()
            raw = self._state.read_many([records.node_key(name, "totals") for name in nodes])
            written = {name: item for name, item in zip(nodes, raw, strict=True) if item is not None}
            found = {name: _fields(item) for name, item in written.items()}
            return {"nodes": found, "sum": _sum(list(found.values()))}
        chosen = self._chosen(node)
        assert chosen is not None
        one = self._state.read(records.node_key(chosen, "totals"))
        return {} if one is None else _fields(one)

    def decides(self, node: str) -> dict[str, Any]:
        """`records.Decides` of the node: the expert that decides and what each would have cost; empty before the first plan."""
        raw = self._state.read(records.node_key(NodeName(node), "decides"))
        return {} if raw is None else _fields(raw)

    def hint_sources(self) -> dict[str, Any]:
        """What became of hints by source, as the controller last told: `sources` and `classifier`; empty where it tells nothing."""
        forecasts = self.fleet.view().forecasts
        if forecasts is None:
            return {}
        return {"classifier": forecasts.hint_classifier, "sources": [msgspec.structs.asdict(source) for source in forecasts.sources]}

    def orders(self, count: int, model: str | None = None, node: str | None = None) -> list[records.OrderRecord]:
        """The last `count` orders, newest first; each as it stands. Of `node`, else of this process's own, else (or with `*`) of all.

        Raises:
            ModelNotFoundError: no such node.
        """
        if node == ALL_NODES or (node is None and self.node is None):
            nodes = self._nodes()
        else:
            chosen = self._chosen(node)
            nodes = [] if chosen is None else [chosen]
        found = [order for name in nodes for order in self._orders_of(name, count, model)]
        if len(nodes) > 1:
            found.sort(key=lambda order: order.issued_s, reverse=True)
        return found[:count]

    def _orders_of(self, node: NodeName, count: int, model: str | None) -> list[records.OrderRecord]:
        raw = self._state.tail(records.node_key(node, "orders"), records.ORDERS_KEPT if model else 4 * count)
        latest: dict[str, records.OrderRecord] = {}
        for item in raw:
            try:
                order = records.decode(item, _orders)
            except ValueError:
                continue
            latest.pop(order.decision_id, None)
            latest[order.decision_id] = order
        return [order for order in reversed(latest.values()) if model is None or order.model == model][:count]

    # --- health ---

    def problems(self) -> list[str]:
        """What keeps this process from doing its work; exercises the node's, the controller's, the store's and the log's real paths."""
        found = [self._check_controller(), self._writer.check()]
        if self._own is not None:
            found.insert(0, self._own.check())
        try:
            if self.node is not None and self._own is not None:
                self.report()
            else:
                self._state.read(records.SWITCH)
        except UnavailableError as exc:
            found.append(str(exc))
        return [problem for problem in found if problem]

    def close(self) -> None:
        """Waits for hints that are being written."""
        self.hints.close()


_orders = msgspec.json.Decoder(records.OrderRecord)
_objects = msgspec.json.Decoder(dict[str, Any])


def _fields(raw: bytes) -> dict[str, Any]:
    """What is written there; nothing where it can't be read: its writer replaces it within seconds."""
    try:
        return records.decode(raw, _objects)
    except ValueError:
        return {}


def _sum(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Field by field; shares are those of the sums."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if part.get(name) is not None]
        if name in _RATIOS:
            continue
        if values and isinstance(values[0], dict):
            found[name] = _sum(values)
        else:
            found[name] = sum(values) if values else None
    if any("accuracy" in part for part in parts):
        outcomes = found.get("outcomes") or {}
        used = outcomes.get("timely", 0) + outcomes.get("late", 0)
        judged = sum(count for outcome, count in outcomes.items() if outcome not in _SETTLED_OTHERWISE)
        found["accuracy"] = used / judged if judged else None
        found["timeliness"] = outcomes.get("timely", 0) / used if used else None
    return found
