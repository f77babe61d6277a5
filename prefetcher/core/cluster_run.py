"""Runs the kernels of a cluster without bytes through a stretch of rows, with an event log that grows as it fills."""

from __future__ import annotations

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.cluster_steps import advance_cluster, close_cluster
from prefetcher.core.demand import Demand
from prefetcher.core.node import EventLog, Hazard
from prefetcher.core.node_run import grown

__all__ = ["finish_cluster", "run_cluster"]


def run_cluster(
    first: int, last: int, until_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> EventLog:
    """`advance_cluster` through rows [first, last) and events up to `until_s`; returns the log, grown as needed."""
    room = max(world.nodes, len(caches.policy)) * len(world.link_s) * (len(world.size_bytes) + 8) + 1
    while len(log.residency) < 2 * room:
        log = grown(log)
    while True:
        first = advance_cluster(first, last, until_s, world, demand, hazard, caches, log)
        if first > last:
            return log
        log = grown(log)


def finish_cluster(rows: int, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog) -> EventLog:
    """Lets running loads finish after the last of `rows` rows, then ends what is held at the log's end."""
    log = run_cluster(rows, rows, float("inf"), world, demand, hazard, caches, log)
    while not close_cluster(world.t1_s, world, caches, log):
        log = grown(log)
    return log
