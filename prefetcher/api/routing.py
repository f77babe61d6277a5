"""Where a router is to send requests: the node that has a model, or gets it, or is cheapest to load it on.

Answers come from what nodes report and from what the controller placed; neither is asked. A report is a second old, so what was just told
to a router is kept for a moment as an intent in the state store, which all endpoints read and write by compare and swap: of a burst no two
endpoints send one model to two nodes, or two models to one node while another is idle. Calls that come while others are decided are
decided together. Covers no request: whoever asks sends it to the node himself, and posts its row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec

from prefetcher.api.fleet import Fleet, View
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.placing import site_of
from prefetcher.core.link_queue import LinkLoad
from prefetcher.core.placement import Placed, Wanted, place
from prefetcher.core.placement_rule import At
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, UnavailableError, shortened
from prefetcher.ports import StateStore

__all__ = ["INTENT_S", "RouteDesk", "Routed"]

#: An intent ends after this: by then the request reached its node and the node's report shows it, or it never will.
INTENT_S = records.REPORT_EXPIRES_S
#: A report that is older than an intent, give or take clocks of nodes, says nothing of it.
_CLOCKS_S = 1.0
#: What was sent to a node takes its link for so long at least, however short the load: whoever was told has yet to send it.
_ON_ITS_WAY_S = 0.1
#: Shares are kept over so many of a model's latest answers, so that shares that change are followed.
_SHARED_ROWS = 64
#: Tries to write intents that others write too: each failure is another endpoint's success.
_TRIES = 100

_intents = msgspec.json.Decoder(records.Intents)
_placements = msgspec.json.Decoder(records.Placements)


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a model's requests go, what it is there (`ready`, `moving`, `placed`), and how long they are expected to wait; `cached` is
    False where it fits nowhere and is served from the tier below."""

    model: str
    node: str
    state: str
    wait_s: float
    cached: bool = True


@dataclass(slots=True)
class _Asked:
    models: Sequence[str]
    answer: Future[list[Routed]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A view, by model: the nodes that can load it with bytes and seconds, and those that have it in memory with open leases."""

    view: View
    able: Mapping[str, list[tuple[NodeName, records.KnownWeights]]]
    ready: Mapping[str, list[tuple[NodeName, int]]]


class RouteDesk:
    """Safe for threads."""

    def __init__(self, state: StateStore, fleet: Fleet, clock: Clock) -> None:
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._guard = threading.Lock()
        self._waiting: list[_Asked] = []
        self._deciding = False
        self._known: _Known | None = None
        #: What was told about ready copies since the view was read, so that a burst is spread over them.
        self._sent: dict[tuple[str, str], int] = {}
        #: Likewise for models whose shares are told, however long ago: by model, how many were sent to each node.
        self._shared: dict[str, dict[str, float]] = {}
        self._told: tuple[bytes | None, records.Placements | None] = (None, None)
        #: The last intents that were read or written: what stands while the store is away.
        self._last = records.Intents()

    def route(self, models: Sequence[str]) -> list[Routed]:
        """An answer for each of `models`, in their order. Those that are nowhere are placed together.

        Raises:
            ModelNotFoundError: no node that reports can load one of them.
            UnavailableError: no node reports, or the state store was not read for longer than reports stand.
        """
        mine = _Asked(models, Future())
        with self._guard:
            self._waiting.append(mine)
            decides = not self._deciding
            self._deciding = True
        while decides:
            with self._guard:
                together, self._waiting = self._waiting, []
                if not together:
                    self._deciding = False
                    break
            self._decide(together)
        return mine.answer.result()

    def _decide(self, together: Sequence[_Asked]) -> None:
        """Answers all of them, whatever happens."""
        try:
            known = self._view()
            good = []
            for asked in together:
                missing = next((m for m in asked.models if m not in known.able and m not in known.ready), None)
                if missing is None:
                    good.append(asked)
                else:
                    error = ModelNotFoundError(f"no model is called {shortened(repr(missing))} on any node that reports", model=missing)
                    asked.answer.set_exception(error)
            rows: dict[str, int] = {}
            for asked in good:
                for model in asked.models:
                    rows[model] = rows.get(model, 0) + 1
            cold = {model: count for model, count in rows.items() if model not in known.ready}
            placed = self._place(cold, known) if cold else {}
            for asked in good:
                asked.answer.set_result([placed[m] if m in placed else self._ready(m, known) for m in asked.models])
        except Exception as exc:  # noqa: BLE001 - whoever waits gets it
            for asked in together:
                if not asked.answer.done():
                    asked.answer.set_exception(exc)

    def _view(self) -> _Known:
        view = self._fleet.view()
        if not view.reports:
            raise UnavailableError("every node has not reported for 5 s; look after the agents", retry_after_s=1.0)
        if self._known is None or self._known.view is not view:
            able: dict[str, list[tuple[NodeName, records.KnownWeights]]] = {}
            ready: dict[str, list[tuple[NodeName, int]]] = {}
            for node, report in view.reports.items():
                for known in report.known:
                    able.setdefault(known.model, []).append((node, known))
                for held in report.held:
                    if held.state == "ready":
                        ready.setdefault(held.model, []).append((node, held.leases))
            self._known = _Known(view, able, ready)
            self._sent.clear()
            if any(len(nodes) > 1 for nodes in ready.values()):
                self._read()
        return self._known

    def _ready(self, model: str, known: _Known) -> Routed:
        """Of several that have it, by the shares that the controller tells; else the one that is used by fewest. Hashing decides among
        equals."""
        there = known.ready[model]
        order = [there[i] for i in by_rendezvous(model, [node for node, _ in there])]
        told = self._placements() if len(there) > 1 else None
        shares = {} if told is None else told.shares.get(model, {})
        sharing = [node for node, _ in order if shares.get(node, 0.0) > 0.0]
        if sharing:
            sent = self._shared.setdefault(model, {})
            node = NodeName(min(sharing, key=lambda name: (sent.get(name, 0.0) + 1.0) / shares[name]))
            sent[node] = sent.get(node, 0.0) + 1.0
            if sum(sent.values()) > _SHARED_ROWS:
                self._shared[model] = {name: count / 2.0 for name, count in sent.items() if name in shares}
        else:
            node, _ = min(order, key=lambda at: at[1] + self._sent.get((model, at[0]), 0))
            self._sent[model, node] = self._sent.get((model, node), 0) + 1
        return Routed(model, node, "ready", 0.0)

    def _placements(self) -> records.Placements | None:
        """What the controller told last, while it stands."""
        told = self._told[1]
        return None if told is None or self._clock.now_s() > told.until_s else told

    # --- what is nowhere yet ---

    def _place(self, cold: Mapping[str, int], known: _Known) -> dict[str, Routed]:
        for _ in range(_TRIES):
            raw, away = self._read()
            now_s = self._clock.now_s()
            standing = self._standing(self._last if away else _read_intents(raw), known, now_s)
            placed = self._decided(cold, known, standing)
            # From the answer on, not from the question.
            now_s = self._clock.now_s()
            new = {
                model: records.Intent(where.node, cold[model], self._load_s(model, where.node, known), now_s, now_s + self._life_s)
                for model, where in placed.items()
                if where.at in (At.ABSENT, At.PLACED)
            }
            after = records.Intents({**standing, **new})
            if not new or away or self._write(raw, after):
                self._last = after
                return {
                    model: Routed(
                        model, where.node, "moving" if where.at is At.MOVING else "placed", round(where.wait_s, 3), cached=where.cached
                    )
                    for model, where in placed.items()
                }
        raise UnavailableError("other endpoints keep placing models; ask again")

    @property
    def _life_s(self) -> float:
        return INTENT_S * self._clock.speed

    def _read(self) -> tuple[bytes | None, bool]:
        """The intents as they are stored, and whether the store is away; takes in what the controller placed."""
        try:
            raw, told = self._state.read_many([records.INTENTS, records.PLACEMENTS])
        except UnavailableError:
            return None, True
        if told != self._told[0]:
            try:
                self._told = (told, None if told is None else records.decode(told, _placements))
            except ValueError:
                self._told = (told, None)
        return raw, False

    def _write(self, before: bytes | None, after: records.Intents) -> bool:
        try:
            return self._state.replace(records.INTENTS, before, records.encode(after))
        except UnavailableError:
            return True  # what others know of it is lost; the answer is as good as it was

    def _standing(self, found: records.Intents, known: _Known, now_s: float) -> dict[str, records.Intent]:
        """Those whose time is not up, of nodes that report, and which no report shows."""
        reports, standing = known.view.reports, {}
        for model, intent in found.models.items():
            report = reports.get(NodeName(intent.node))
            if report is None or not now_s < intent.until_s <= now_s + 2.0 * self._life_s:
                continue
            shown = any(h.model == model for h in report.held) or any(q.model == model for q in report.queued)
            if not (shown and report.at_s > intent.at_s - _CLOCKS_S * self._clock.speed):
                standing[model] = intent
        return standing

    def _load_s(self, model: str, node: str, known: _Known) -> float:
        return next((entry.load_s for name, entry in known.able[model] if name == node), 0.0)

    def _decided(self, cold: Mapping[str, int], known: _Known, standing: Mapping[str, records.Intent]) -> dict[str, Placed]:
        told, now_s = self._placements(), self._clock.now_s()
        load_s: dict[NodeName, dict[str, float]] = {}
        size: dict[str, float] = {}
        for model in cold:
            for node, entry in known.able.get(model, ()):
                load_s.setdefault(node, {})[model] = entry.load_s
                size[model] = max(size.get(model, 0.0), float(entry.bytes))
        sites = []
        for node, mine in load_s.items():
            report = known.view.reports[node]
            told_s = sorted((intent.at_s, m, intent) for m, intent in standing.items() if intent.node == node)
            way_s = _ON_ITS_WAY_S * self._clock.speed
            age_s = min(max(0.0, now_s - report.at_s), records.REPORT_EXPIRES_S * self._clock.speed)
            coming = {m: LinkLoad(intent.at_s - now_s, max(intent.load_s, way_s), float(intent.rows)) for _, m, intent in told_s}
            # One that is both there and announced counts once.
            seen = msgspec.structs.replace(report, queued=tuple(q for q in report.queued if q.model not in coming))
            room = None if told is None else told.rooms.get(node)
            site = site_of(seen, mine, room, age_s=age_s, coming=coming)
            if told is not None:
                at = {m: At.PLACED for m in mine if m not in site.at and told.homes.get(m) == node}
                site = replace(site, at={**site.at, **at})
            sites.append(site)
        return place([Wanted(model, float(rows), size.get(model, 0.0)) for model, rows in cold.items()], sites)


def _read_intents(raw: bytes | None) -> records.Intents:
    """Those that are stored; none where they can't be read: the next write replaces them."""
    try:
        return records.Intents() if raw is None else records.decode(raw, _intents)
    except ValueError:
        return records.Intents()
