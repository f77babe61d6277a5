"""The nodes that a controller plans for: who reports what, what people switched and pinned, and which node a model is at home on.

Covers neither plans nor shadow caches, nor where copies of one model are worth having on several nodes: a model has one home.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefetcher.controller import records
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["Nodes"]

#: A node that did not report for this long is planned for no more.
_FORGOTTEN_S = 86_400.0


class Nodes:
    """`always` are planned for before they report; others once they do."""

    def __init__(self, state: StateStore, always: Sequence[NodeName]) -> None:
        self._state = state
        self._always = always
        self.names: list[NodeName] = list(always)
        self.reports: dict[NodeName, records.NodeReport] = {}
        self._known: dict[NodeName, frozenset[str]] = {}
        self._held: dict[NodeName, frozenset[str]] = {}
        self._read_s: dict[NodeName, float] = {}
        #: Nodes of which the log said that their report can't be read.
        self._unreadable: set[NodeName] = set()
        self._switch: records.Switch | None = None
        self._said: dict[str, str] = {}
        #: The node that served each model last.
        self._served: dict[str, NodeName] = {}

    def look(self, now_s: float) -> None:
        """Reads who reports now.

        Raises:
            UnavailableError: the state store does not answer.
        """
        seen = map(NodeName, self._state.members(records.NODES, now_s - _FORGOTTEN_S))
        self.names = list(dict.fromkeys([*self._always, *seen]))
        raw = self._state.read_many([records.node_key(node, "report") for node in self.names])
        self.reports.clear()
        for node, report in zip(self.names, raw, strict=True):
            if report is not None:
                self.take(node, report, now_s)

    def take(self, node: NodeName, raw: bytes, now_s: float) -> records.NodeReport | None:
        """The report of `node`, read at `now_s`; None for what is none: such a node is as good as silent."""
        try:
            report = records.decode_report(raw, node)
        except ValueError as exc:
            if node not in self._unreadable:
                log().error("report_unreadable", node=node, reason=str(exc), then="nothing is planned for it before its next report")
            self._unreadable.add(node)
            self.reports.pop(node, None)
            return None
        self._unreadable.discard(node)
        self.reports[node] = report
        self._read_s[node] = now_s
        self._known[node] = frozenset(k.model for k in report.known)
        self._held[node] = frozenset(h.model for h in report.held)
        return report

    def read_switch(self, raw: bytes | None) -> records.Switch:
        """The switch of all nodes; while it can't be read, or went missing, the last one stands, and before any was read, off."""
        if raw is not None:
            try:
                self._switch = records.decode_switch(raw)
                self._say_once("switch_unreadable", "")
            except ValueError as exc:
                self._say_once("switch_unreadable", str(exc), "the last one stands; set it again with `prefetcher on` or `prefetcher off`")
                return self._switch or records.Switch(on=False)
        return self._switch or records.Switch()

    def read_pins(self, raw: bytes | None) -> dict[str, records.Pin]:
        """Pins of all nodes; none while they can't be read."""
        try:
            found = records.decode_pins(raw)
        except ValueError as exc:
            self._say_once("pins_unreadable", str(exc), "planning as if nothing was pinned; pin again what is to stay")
            return {}
        self._say_once("pins_unreadable", "")
        return found

    def _say_once(self, event: str, reason: str, then: str = "") -> None:
        """Says what is wrong in the log once, as long as it stays so; '' for what is well."""
        if reason and reason != self._said.get(event):
            log().error(event, reason=reason, then=then)
        self._said[event] = reason

    def may_bring(self, node: NodeName, model: str, since_s: float) -> bool:
        """Whether an order for `model` could bring it to `node`: known there and not in memory, or not told since `since_s`."""
        if self._read_s.get(node, float("-inf")) < since_s:
            return True
        return model in self._known.get(node, ()) and model not in self._held.get(node, ())

    def served(self, rows: Iterable[RequestSeen]) -> None:
        """Rows that name their node say where their models are asked for."""
        for row in rows:
            if row.node is not None:
                self._served[row.model] = row.node

    def home(self, model: str, ordered: Iterable[NodeName] = ()) -> NodeName | None:
        """The node that hints for `model`, and rows that name none, are for; None where no node can load it.

        The one that has its weights or gets them, else one that they are `ordered` for, else the one that served it last, else the one that
        hashing gives it among those that can load it. Of one node alone, that one.
        """
        if len(self.names) == 1:
            return self.names[0]
        able = [node for node in self.reports if model in self._known[node]]
        having = [node for node in able if model in self._held[node]]
        last = self._served.get(model)
        coming = [node for node in ordered if node in able]
        for found in (having, coming, [last] if last in able else [], able):
            if found:
                return found[by_rendezvous(model, found)[0]]
        return None
