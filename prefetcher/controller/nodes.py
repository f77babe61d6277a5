"""The nodes that a controller plans for: who reports what, what people switched and pinned, and which node a model is at home on.

Covers neither plans nor shadow caches, nor how what is wanted and nowhere is spread over nodes (`controller.placing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefetcher.controller import records
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.routing_shares import RoutingShares
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["Nodes"]

#: A node that was not there for this long is planned for no more.
_SILENT_S = 86_400.0
#: A node that has the weights stays their home until another gets this many times its share of the requests.
_LEAVES_AT = 2.0


class Nodes:
    """`always` are planned for before they report; others once they do."""

    def __init__(self, state: StateStore, always: Sequence[NodeName]) -> None:
        self._state = state
        self._always = always
        self.names: list[NodeName] = list(always)
        self.reports: dict[NodeName, records.NodeReport] = {}
        self._known_ever: frozenset[NodeName] = frozenset()
        self._known: dict[NodeName, frozenset[str]] = {}
        self._held: dict[NodeName, frozenset[str]] = {}
        self._read_s: dict[NodeName, float] = {}
        #: Nodes of which the log said that their report can't be read.
        self._unreadable: set[NodeName] = set()
        self._switch: records.Switch | None = None
        self._said: dict[str, str] = {}
        self._ready: dict[NodeName, frozenset[str]] = {}
        #: The nodes that can load each model, in order, and which of them hashing prefers; made anew where a node's catalog changes.
        self._able: dict[str, list[NodeName]] = {}
        self._hashed: dict[str, NodeName] = {}
        self._counted: dict[NodeName, frozenset[str]] = {}
        self._by_name: dict[NodeName, tuple[records.NodeReport, dict[str, records.KnownWeights]]] = {}
        self.shares = RoutingShares()
        #: Where what is wanted and nowhere was placed (`controller.placing`).
        self.placed: Mapping[str, NodeName] = {}

    def restore_shares(self, snapshot: Any) -> None:
        """Goes on from what was learned of routes, at the next look without nodes that were forgotten. Raises ValueError."""
        self.shares.restore(snapshot)
        self._known_ever = frozenset(map(NodeName, self.shares.nodes()))

    def look(self, now_s: float) -> None:
        """Reads who reports now.

        Raises:
            UnavailableError: the state store does not answer.
        """
        seen = {NodeName(name): at_s for name, at_s in sorted(self._state.last_seen(records.NODES).items())}
        self.names = list(dict.fromkeys([*self._always, *(node for node, at_s in seen.items() if at_s >= now_s - _SILENT_S)]))
        self._let_go()
        # A node that is only silent is asked for as it was before when it comes back; one that was forgotten is not.
        gone = self._known_ever - seen.keys() - set(self._always)
        # A store that has no fence of any leader lost its memory.
        for node in gone if gone and self._state.read(records.FENCE) is not None else ():
            self.shares.drop(node)
        self._known_ever = frozenset(seen)
        raw = self._state.read_many([records.node_key(node, "report") for node in self.names])
        self.reports.clear()
        for node, report in zip(self.names, raw, strict=True):
            if report is not None:
                self.take(node, report, now_s)

    def _let_go(self) -> None:
        """Keeps nothing of nodes that were not there for a day, or were forgotten."""
        there = set(self.names)
        kept: tuple[dict[NodeName, Any], ...] = (self._known, self._held, self._read_s, self._ready, self._by_name, self.reports)
        for of in kept:
            for node in of.keys() - there:
                del of[node]
        self._unreadable &= there
        self._count()

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
        known = frozenset(k.model for k in report.known)
        # The same set as before while it says the same: `_count` looks no further.
        self._known[node] = self._known[node] if self._known.get(node) == known else known
        self._held[node] = frozenset(h.model for h in report.held)
        self._ready[node] = frozenset(h.model for h in report.held if h.state == "ready")
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
        """Rows that name their node say where their models are asked for, and whether they are there."""
        for row in rows:
            self.shares.saw(row.model, row.node, row.ts, row.node is not None and row.model not in self._ready.get(row.node, ()))

    def able(self, model: str) -> list[NodeName]:
        """The nodes that report and can load `model`, in the order of names."""
        self._count()
        return self._able.get(model, [])

    def _count(self) -> None:
        """Takes in which nodes came, went, or know other models."""
        for node in [*self._counted.keys(), *(self.reports.keys() - self._counted.keys())]:
            before, now = self._counted.get(node, frozenset()), self._known[node] if node in self.reports else frozenset()
            if before is now:
                continue
            for model in before ^ now:
                nodes = set(self._able.get(model, ())) ^ {node}
                self._able[model] = sorted(nodes)
                self._hashed.pop(model, None)
            self._counted[node] = now
        for node in self._counted.keys() - self.reports.keys():
            del self._counted[node]

    def having(self, model: str) -> list[NodeName]:
        """The nodes that have the weights of `model` in memory or on their way."""
        return [node for node in self.able(model) if model in self._held[node]]

    def size_of(self, node: NodeName, model: str) -> float:
        """The bytes of `model` as `node` knows it; 0 where it does not."""
        known = self._entries(node).get(model)
        return 0.0 if known is None else float(known.bytes)

    def load_s(self, node: NodeName, model: str) -> float:
        """How long loading `model` takes the link of `node`; 0 where it can't be loaded."""
        known = self._entries(node).get(model)
        return 0.0 if known is None else known.load_s

    def _entries(self, node: NodeName) -> dict[str, records.KnownWeights]:
        report = self.reports.get(node)
        if report is None:
            return {}
        found = self._by_name.get(node)
        if found is None or found[0] is not report:
            found = self._by_name[node] = (report, {k.model: k for k in report.known})
        return found[1]

    def has_ready(self, node: NodeName, model: str) -> bool:
        return model in self._ready.get(node, ())

    def home(self, model: str, ordered: Iterable[NodeName] = ()) -> NodeName | None:
        """The node that hints for `model`, and rows that name none, are for; None where no node can load it.

        Where requests name nodes, the one that gets most of them, unless one that has the weights may get half as many, those that name
        none included. Else the one that has the weights or gets them, else one that they are `ordered` for, else where they were placed,
        else the one that hashing gives it among those that can load it. Of one node alone, that one.
        """
        if len(self.names) == 1:
            return self.names[0]
        able = self.able(model)
        if not able:
            return None
        having = [node for node in able if model in self._held[node]]
        shares = self.shares.of(model, able)
        if shares:
            most, unnamed = max(shares.values()), 1.0 - sum(shares.values())
            liked = [node for node in having if (shares.get(node, 0.0) + unnamed) * _LEAVES_AT >= most]
            liked = liked or [NodeName(node) for node, share in shares.items() if share == most]
            return liked[by_rendezvous(model, liked)[0]]
        coming = [node for node in ordered if node in able]
        at = self.placed.get(model)
        for found in (having, coming, [at] if at in able else []):
            if found:
                return found[by_rendezvous(model, found)[0]] if len(found) > 1 else found[0]
        hashed = self._hashed.get(model)
        if hashed is None:
            hashed = self._hashed[model] = able[by_rendezvous(model, able)[0]]
        return hashed
