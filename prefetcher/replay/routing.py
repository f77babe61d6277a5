"""Where ours sends a row that names no node, in a log in which other rows do name theirs.

Only then can weights be anywhere but on the node that rendezvous hashing gives their model: rows that name a node bring them there. A
row without one goes where its model's weights are ready, else where they move or wait to move, else by hashing; of several nodes to the
one that hashing prefers. A prefetch moves from the moment at which it is decided, so that "where the plan puts it" is among the moving
ones. The live cache decides; experts and shadow see each node's rows as it got them.

The nodes go through the log together, exact to the row: before a row is sent, the nodes that may hold its model have come to its time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefetcher.core.node import Found, World
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.replay.engine import NodeLog
from prefetcher.replay.ours import NodeRun, RateBlock
from prefetcher.replay.trace import Trace

__all__ = ["RoutedNodes", "needs_routing"]


def needs_routing(trace: Trace) -> bool:
    """Whether some rows name a node and others do not."""
    return len(trace.node_names) > 1 and bool((trace.node < 0).any())


class _Lane:
    """A node whose rows are dealt out one by one; arrays have room for all that may come to it."""

    def __init__(self, part: NodeLog, room: int, make: Callable[[World], NodeRun]) -> None:
        self.node = part.node
        self.rows = np.zeros(room, np.int64)
        self.filled = 0
        unknown = np.full(len(part.world.size_bytes), np.inf)
        self.world = part.world._replace(ts=np.zeros(room), model=np.zeros(room, np.int32), next_ts=np.full(room, np.inf), first_ts=unknown)
        self.run = make(self.world)
        self._rates = np.zeros((0, 0), np.float32)
        self._rates_from = 0

    def see(self, block: RateBlock, hints: npt.NDArray[np.void] | None) -> None:
        self._rates, self._rates_from = np.zeros_like(block.after_row), self.filled
        self.run.see(block, self._rates, hints)

    def add(self, row: int, ts: float, model: int, rates: npt.NDArray[np.float32]) -> None:
        self.rows[self.filled], self.world.ts[self.filled], self.world.model[self.filled] = row, ts, model
        self._rates[:, self.filled - self._rates_from] = rates
        self.filled += 1

    def go(self, until_s: float) -> None:
        self.run.go(self.filled, until_s)


class RoutedNodes:
    """Ours on all nodes of `trace`; `parts` are its nodes, `make` builds the run of one of them from its world."""

    def __init__(self, trace: Trace, parts: list[NodeLog], make: Callable[[World], NodeRun]) -> None:
        self._trace = trace
        names, models = [part.node for part in parts], len(trace.models)
        named = np.zeros((len(names), models), np.bool_)
        has_node = trace.node >= 0
        named[trace.node[has_node], trace.model[has_node]] = True
        orders = [by_rendezvous(model, names) for model in trace.models]
        #: The nodes that may come to hold each model, those that hashing prefers first.
        self._nodes = [[k for k in order if k == order[0] or named[k, m]] for m, order in enumerate(orders)]
        unnamed = np.bincount(trace.model[~has_node], minlength=models)
        room = [
            int((trace.node == k).sum()) + sum(int(unnamed[m]) for m in range(models) if k in self._nodes[m]) for k in range(len(names))
        ]
        self._lanes = [_Lane(part, n, make) for part, n in zip(parts, room, strict=True)]

    def take(self, block: RateBlock, hints: list[npt.NDArray[np.void]] | None = None) -> None:
        """All nodes go through a block; `hints` are each node's."""
        trace, first = self._trace, block.first_row
        for k, lane in enumerate(self._lanes):
            lane.see(block, None if hints is None else hints[k])
        for end_s, until_s in block.periods(trace.t1):
            for lane in self._lanes:
                lane.run.begin_period()
            last = int(np.searchsorted(trace.ts, end_s))
            for row in range(first, last):
                ts, model, node = float(trace.ts[row]), int(trace.model[row]), int(trace.node[row])
                lane = self._lanes[node if node >= 0 else self._choose(model, ts)]
                lane.add(row, ts, model, block.after_row[:, row - block.first_row])
            first = last
            for lane in self._lanes:
                lane.go(until_s)
                lane.run.end_period()

    def _choose(self, model: int, now_s: float) -> int:
        nodes = self._nodes[model]
        moving = -1
        for k in nodes if len(nodes) > 1 else ():
            lane = self._lanes[k]
            lane.go(now_s)
            found = lane.run.found(model, now_s)
            if found == Found.READY:
                return k
            if moving < 0 and found != Found.ABSENT:
                moving = k
        return moving if moving >= 0 else nodes[0]

    def close(self) -> tuple[list[NodeLog], list[NodeRun]]:
        """Lets running loads finish and ends what is held. Returns each node's rows, as they were sent, and its run."""
        parts = []
        for lane in self._lanes:
            lane.run.close()
            parts.append(NodeLog(lane.node, lane.rows[: lane.filled], lane.world))
        return parts, [lane.run for lane in self._lanes]
