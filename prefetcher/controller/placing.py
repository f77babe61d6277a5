"""The step across nodes: what is wanted soon and is nowhere is spread over nodes and links, all of it together; and who gets how much of a
model's demand.

A plan is one node's (`controller.planning`); here it is decided which node plans for which model, and with which share of its forecast.
For the controller's thread. Covers no order: a plan still weighs what a prefetch displaces against what it earns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from prefetcher.controller import records
from prefetcher.controller.nodes import Nodes
from prefetcher.core.link_queue import LinkLoad, link_goes_on
from prefetcher.core.placement import Site, Wanted, place
from prefetcher.core.placement_rule import At
from prefetcher.core.routing_shares import second_copy_gain
from prefetcher.core.types import NodeName
from prefetcher.core.value import price_per_byte_s

__all__ = ["ELSEWHERE", "MOVING_STATES", "Placing", "room_of", "site_of"]

Floats = npt.NDArray[np.float64]

#: Models that are placed together; the likelier ones come first, and the next ones see their loads.
_TOGETHER = 10
#: Models that are placed in one step at most: what is likely and nowhere beyond them is left to hashing.
_MOST = 40
#: A chance of use below this is no reason to place a model anywhere.
_LEAST_CHANCE = 0.05
#: A node that forecasts don't send anything to keeps what it holds at this share of its worth: it goes first, but not before it is in the
#: way or costs more than that.
ELSEWHERE = 0.05
#: A second copy must earn so many times what it costs to come, and as much as it costs to stay.
_SECOND_AT = 2.0
#: Rows of a model that wait at its node less often than this are no reason for another copy.
_LEAST_BEHIND = 0.2
#: States of weights that are on their way into memory.
MOVING_STATES = frozenset({"moving", "pausing", "paused"})


def room_of(report: records.NodeReport, index: Mapping[str, float], hold_s: float) -> records.NodeRoom:
    """What memory costs on a node whose plan ranks models by `index` (seconds of waiting saved per byte-second), over `hold_s`."""
    leaves = [h for h in report.held if _may_leave(h)]
    evictable = float(sum(h.memory_bytes for h in leaves))
    value = sum(h.memory_bytes * max(0.0, index.get(h.model, 0.0)) for h in leaves)
    return records.NodeRoom(evictable, value / evictable * hold_s if evictable else 0.0)


def _may_leave(held: records.HeldWeights) -> bool:
    return (held.state == "ready" or held.is_part) and not held.leases and not held.pinned


def site_of(
    report: records.NodeReport,
    load_s: Mapping[str, float],
    room: records.NodeRoom | None = None,
    *,
    age_s: float = 0.0,
    coming: Mapping[str, LinkLoad] = MappingProxyType({}),
    guesses: bool = False,
) -> Site:
    """A node as placement sees it, of a report that is `age_s` old; the models of `load_s` can be loaded there.

    Without a `room`, what is there and may leave does, for nothing. `coming`: loads that were sent there since, by model, their times from
    now on (below 0). `guesses`: what is wanted is no demand, so nothing gives way to it.
    """
    link = max(1.0, report.link_bytes_per_s)
    at: dict[str, At] = {}
    ready_in_s: dict[str, float] = {}
    guessed_s = 0.0
    for held in report.held:
        if held.state == "ready":
            at[held.model] = At.READY
        elif held.state in MOVING_STATES:
            at.setdefault(held.model, At.MOVING)
            ready_in_s[held.model] = left_s = max(0.0, max(0, held.bytes - held.bytes_done) / link - age_s)
            if guesses and held.state == "moving":
                guessed_s = max(guessed_s, left_s)
    # What moves comes first of equals: it has begun. The link went on with all of it for as long as the report is old.
    asked = sorted(report.queued, key=lambda q: (not q.moving, q.model))
    names = [*(q.model for q in asked), *coming]
    loads = [*(LinkLoad(-age_s, q.left_s, float(max(q.rows, 1))) for q in asked), *coming.values()]
    queue: list[tuple[float, float]] = []
    for model, load, (left_s, end_s) in zip(names, loads, link_goes_on(loads, 0.0), strict=True):
        if at.get(model) is not At.READY:
            at[model], ready_in_s[model] = At.MOVING, max(0.0, end_s)
        if left_s > 0.0:
            queue.append((left_s, load.rows))
    free = float(report.memory.budget_bytes - report.memory.taken_bytes - (report.memory.reserve_bytes if guesses else 0))
    # What waits for the link takes its memory when its turn comes.
    there = {held.model: held.memory_bytes for held in report.held}
    waits = set(names)
    if waits:
        free -= sum(max(0, known.bytes - there.get(known.model, 0)) for known in report.known if known.model in waits)
    evictable = float(sum(h.memory_bytes for h in report.held if _may_leave(h)))
    return Site(
        node=report.node,
        load_s=load_s,
        at=at,
        ready_in_s=ready_in_s,
        # A prefetch goes after all that is asked for, whatever it is.
        running_s=max(sum(left_s for left_s, _ in queue), guessed_s) if guesses else 0.0,
        queue=() if guesses else queue,
        free_bytes=free,
        evictable_bytes=evictable if room is None else min(evictable, room.evictable_bytes),
        displaced_s_per_byte=0.0 if room is None else room.displaced_s_per_byte,
    )


class Placing:
    """Which node each wanted model goes to, and the shares of all. `ordered(model)` names the nodes that have an open order for it."""

    def __init__(self, nodes: Nodes, price_s_per_gb_h: float, hold_s: float, ordered: Callable[[str], Sequence[NodeName]]) -> None:
        self._nodes = nodes
        self._price = price_per_byte_s(price_s_per_gb_h)
        self._hold_s = hold_s
        self._ordered = ordered
        self._placed: dict[str, NodeName] = {}
        #: The node of a second copy of each model that has one, and its share of the demand.
        self._second: dict[str, tuple[NodeName, float]] = {}
        self.rooms: dict[NodeName, records.NodeRoom] = {}
        nodes.placed = self._placed

    def home(self, model: str) -> NodeName | None:
        return self._nodes.home(model, self._ordered(model))

    def planned(self, report: records.NodeReport, index: Mapping[str, float]) -> None:
        """A plan ranks the models of a node by `index`."""
        self.rooms[NodeName(report.node)] = room_of(report, index, self._hold_s)

    def keep_only(self, nodes: Collection[NodeName]) -> None:
        """Other nodes are gone for good: nothing is placed there, and no second copy."""
        self.rooms = {node: room for node, room in self.rooms.items() if node in nodes}
        self._second = {model: at for model, at in self._second.items() if at[0] in nodes}
        for model in [model for model, node in self._placed.items() if node not in nodes]:
            del self._placed[model]

    # --- what is wanted and nowhere ---

    def place(self, chances: Mapping[str, float]) -> None:
        """Places what is likely to be used soon: `chances` by model, 0 to 1. What is there or on its way, and what rows name a node for,
        is where it is; what was placed and is wanted no more is forgotten."""
        nodes = self._nodes
        if len(nodes.reports) < 2:
            self._placed.clear()
            return
        likely = [(chance, model) for model, chance in chances.items() if chance >= _LEAST_CHANCE and self._is_nowhere(model)]
        likely.sort(key=lambda pair: (-pair[0], pair[1]))
        wanted = [Wanted(model, chance, self._bytes_of(model)) for chance, model in likely[:_MOST]]
        before, after = dict(self._placed), dict[str, NodeName]()
        for first in range(0, len(wanted), _TOGETHER):
            group = wanted[first : first + _TOGETHER]
            sites = self._sites([want.model for want in group], before, after, wanted[:first])
            after |= {model: NodeName(at.node) for model, at in place(group, sites).items()}
        self._placed.clear()
        self._placed.update(after)

    def _is_nowhere(self, model: str) -> bool:
        nodes = self._nodes
        able = nodes.able(model)
        return len(able) > 1 and not nodes.having(model) and not nodes.shares.of(model, able)

    def _bytes_of(self, model: str) -> float:
        return max((self._nodes.size_of(node, model) for node in self._nodes.able(model)), default=0.0)

    def _sites(
        self, group: Sequence[str], before: Mapping[str, NodeName], after: Mapping[str, NodeName], earlier: Sequence[Wanted]
    ) -> list[Site]:
        """The nodes that can load any of `group`, with what was placed there in this step and ordered before."""
        nodes, found = self._nodes, []
        able = {node for model in group for node in nodes.able(model)}
        ordered = {model: set(self._ordered(model)) for model in group}
        for node in sorted(able):
            report = nodes.reports[node]
            load_s = {model: nodes.load_s(node, model) for model in group if node in nodes.able(model)}
            site = site_of(report, load_s, self.rooms.get(node), guesses=True)
            at = dict(site.at)
            for model in group:
                if model not in at and (before.get(model) == node or node in ordered[model]):
                    at[model] = At.PLACED
            mine = [want for want in earlier if after.get(want.model) == node]
            queue = [*site.queue, *((nodes.load_s(node, want.model), want.rows) for want in mine)]
            free = site.free_bytes - sum(want.size_bytes for want in mine)
            found.append(replace(site, at=at, queue=queue, free_bytes=free))
        return found

    # --- shares ---

    def shares(self, model: str) -> dict[NodeName, float]:
        """Which share of the demand for `model` each node gets; 1 in all, {} where no node can load it."""
        home = self.home(model)
        if home is None:
            return {}
        named = {NodeName(n): share for n, share in self._nodes.shares.of(model, self._nodes.able(model)).items()}
        named[home] = named.get(home, 0.0) + max(0.0, 1.0 - sum(named.values()))
        second = self._second.get(model)
        if second is not None and second[0] != home and second[0] in self._nodes.able(model):
            moved = min(second[1], named[home])
            named[home] -= moved
            named[second[0]] = named.get(second[0], 0.0) + moved
        return named

    def shares_at(self, names: Sequence[str]) -> dict[NodeName, npt.NDArray[np.float32]] | None:
        """By node, float32[n]: how much of the forecast of each of `names` is its own. None where one node gets everything."""
        reports = self._nodes.reports
        if len(self._nodes.names) < 2:
            return None
        found = {node: np.full(len(names), ELSEWHERE, np.float32) for node in reports}
        for number, model in enumerate(names):
            for node, share in self.shares(model).items():
                if node in found:
                    found[node][number] = max(share, ELSEWHERE)
        return found

    def weigh_copies(self, rates_per_s: Mapping[str, float]) -> None:
        """Where a second copy pays: of models that are ready on their node, whose rows wait there all the same. `rates_per_s` by model."""
        nodes = self._nodes
        found: dict[str, tuple[NodeName, float]] = {}
        for model, rate_per_s in rates_per_s.items():
            able = nodes.able(model)
            if len(able) < 2 or rate_per_s <= 0.0:
                continue
            home = self.home(model)
            if home is None:
                continue
            behind = nodes.shares.behind(model, home)
            if behind < _LEAST_BEHIND:
                continue
            first_wait_s = nodes.reports[home].recent_wait_s + nodes.load_s(home, model)
            gain = second_copy_gain(rate_per_s, 0.0, behind, 0.0, first_wait_s)
            stays = self._second.get(model, ("", 0.0))[0]
            choices = []
            for node in able:
                if node == home:
                    continue
                size, report = nodes.size_of(node, model), nodes.reports[node]
                free = 0.0 if nodes.has_ready(node, model) else max(0.0, size - report.memory.budget_bytes + report.memory.taken_bytes)
                room = self.rooms.get(node)
                displaced = 0.0 if room is None else free * room.displaced_s_per_byte / self._hold_s
                cost = self._price * size + displaced
                if size <= report.memory.budget_bytes and gain >= cost * (1.0 if node == stays else _SECOND_AT):
                    choices.append((node != stays, cost, report.recent_wait_s, node))
            if choices:
                found[model] = (min(choices)[3], min(0.5, behind))
        self._second = found

    # --- for endpoints ---

    def told(self, now_s: float, until_s: float) -> records.Placements:
        """What routers are told by."""
        shares = {}
        for model in dict.fromkeys([*self._nodes.shares.models(), *self._second]):
            found = self.shares(model)
            if len(found) > 1:
                shares[model] = {str(node): round(share, 4) for node, share in found.items()}
        homes = {model: str(node) for model, node in self._placed.items()}
        rooms = {str(node): room for node, room in self.rooms.items() if node in self._nodes.reports}
        return records.Placements(now_s, until_s, homes, shares, rooms)
