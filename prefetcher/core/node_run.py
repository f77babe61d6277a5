"""Runs the kernels of a node without bytes through a stretch of rows, with an event log that grows as it fills."""

from __future__ import annotations

import numpy as np

from prefetcher.core.demand import Demand
from prefetcher.core.node import Caches, EventLog, Hazard, World
from prefetcher.core.node_steps import advance

__all__ = ["grown", "run_rows"]


def grown(log: EventLog) -> EventLog:
    """The same log with twice the room."""
    longer = {}
    for name in ("residency", "transfers", "orders"):
        old = getattr(log, name)
        new = np.zeros(2 * len(old), old.dtype)
        new[: len(old)] = old
        longer[name] = new
    return log._replace(**longer)


def run_rows(
    first: int, last: int, until_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog
) -> EventLog:
    """`advance` through rows [first, last) and events up to `until_s`; returns the log, grown as needed."""
    room = len(caches.policy) * (len(world.size_bytes) + 8) + 1
    while len(log.residency) < 2 * room:
        log = grown(log)
    while True:
        first = advance(first, last, until_s, world, demand, hazard, caches, log)
        if first > last:
            return log
        log = grown(log)
