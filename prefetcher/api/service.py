"""What the HTTP endpoint can do, without HTTP: takes requests in, acts by hand, and answers questions about nodes, orders and earnings.

Reads what agents and controllers wrote to the state store, and never their insides; only acts by hand go to the node directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.errors import ModelNotFoundError, UnavailableError, shortened
from prefetcher.ports import Acted, StateStore, StreamWriter, Topic
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import request_records

__all__ = ["ACTS", "NodeByHand", "Service"]

#: What can be done to a model by hand.
ACTS = ("pin", "unpin", "load", "evict")


class NodeByHand(Protocol):
    """A node as people may handle it."""

    def act(self, act: str, model: str) -> Acted:
        """Raises ModelNotFoundError for an unknown model and UnavailableError when the node does not answer."""
        ...

    def switch(self, on: bool) -> None: ...

    def check(self) -> str:
        """'' when the node's own path answers, else what is wrong."""
        ...


class Service:
    """The application as an endpoint sees it. Safe for threads.

    `wake(reason)` tells the controller that something happened; `check_controller` gives '' or what is wrong with it.
    """

    def __init__(
        self,
        node: NodeName,
        writer: StreamWriter,
        state: StateStore,
        by_hand: NodeByHand,
        clock: Clock,
        metrics: Metrics,
        wake: Callable[[str], None],
        check_controller: Callable[[], str],
    ) -> None:
        self._node = node
        self._writer = writer
        self._state = state
        self._by_hand = by_hand
        self._clock = clock
        self._metrics = metrics
        self._wake = wake
        self._check_controller = check_controller
        self._pins_lock = threading.Lock()

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    def take(self, requests: Sequence[RequestSeen], source: str) -> None:
        """Appends rows to the stream and returns once they are durable. Raises NoRoomError."""
        self._writer.append(Topic.REQUESTS, request_records(requests))
        self._metrics.requests.labels(source=source).inc(len(requests))
        self._wake("")

    def report(self) -> records.NodeReport:
        """The node's own report. Raises UnavailableError while there is none."""
        raw = self._state.read(records.node_key(self._node, "report"))
        if raw is None:
            raise UnavailableError(f"node {self._node} has not reported for {records.REPORT_EXPIRES_S:.0f} s", retry_after_s=1.0)
        return records.decode_report(raw)

    def switched_on(self) -> bool:
        raw = self._state.read(records.SWITCH)
        return raw is None or msgspec.json.decode(raw, type=records.Switch).on

    def totals(self) -> dict[str, Any]:
        """What the node's ledger adds up to (`docs/http.md` names the fields); empty before it was written first."""
        raw = self._state.read(records.node_key(self._node, "totals"))
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])

    def decides(self) -> dict[str, Any]:
        """`records.Decides` of the node: the expert that decides and what each would have cost; empty before the first plan."""
        raw = self._state.read(records.node_key(self._node, "decides"))
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any])

    def orders(self, count: int, model: str | None = None) -> list[records.OrderRecord]:
        """The last `count` orders, newest first; each as it stands."""
        raw = self._state.tail(records.node_key(self._node, "orders"), records.ORDERS_KEPT if model else 4 * count)
        latest: dict[str, records.OrderRecord] = {}
        for item in raw:
            order = msgspec.json.decode(item, type=records.OrderRecord)
            latest.pop(order.decision_id, None)
            latest[order.decision_id] = order
        found = [order for order in reversed(latest.values()) if model is None or order.model == model]
        return found[:count]

    def act(self, act: str, model: str) -> Acted:
        """Does `act` to a model by hand. A pin holds across restarts and on every node."""
        report = self.report()
        if model not in {k.model for k in report.known}:
            why = next((problem for problem in report.problems if problem.startswith(f"{model}: ")), "")
            if why:
                raise ModelNotFoundError(f"{why}; put it right and run `prefetcher manifest` on its folder", model=model)
            raise ModelNotFoundError(
                f"no model is called {shortened(repr(model))} on node {self._node}; `prefetcher status` lists them", model=model
            )
        acted = self._by_hand.act(act, model)
        if acted.ok and act in ("pin", "unpin"):
            with self._pins_lock:
                raw = self._state.read(records.PINS)
                pins = set(msgspec.json.decode(raw, type=list[str])) if raw else set()
                pins = pins | {model} if act == "pin" else pins - {model}
                self._state.write({records.PINS: records.encode(sorted(pins))})
        log().info("acted_by_hand", act=act, model=model, ok=acted.ok, reason=acted.reason)
        self._wake(act)
        return acted

    def switch(self, on: bool, by: str) -> None:
        """Prefetching on or off, at once, on every node."""
        self._state.write({records.SWITCH: records.encode(records.Switch(on=on, since_s=self.now_s, by=by))})
        self._by_hand.switch(on)
        self._metrics.prefetching.set(1.0 if on else 0.0)
        log().info("switched", on=on, by=by)
        self._wake("switch")

    def problems(self) -> list[str]:
        """What keeps this process from doing its work; exercises the node's, the controller's, the store's and the log's real paths."""
        found = [self._by_hand.check(), self._check_controller(), self._writer.check()]
        try:
            self.report()
        except UnavailableError as exc:
            found.append(str(exc))
        return [problem for problem in found if problem]
