"""One node's log through any caches: builds the world of the core's kernels and turns their events into the four logs.

The kernels are `prefetcher.core.node_steps`; here is only what surrounds them: which rows belong to which node, growing the event log, and
naming things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefetcher.core.demand import Demand
from prefetcher.core.node import BLOCK_BYTES, Caches, EventLog, Hazard, World
from prefetcher.core.node_run import grown, run_rows
from prefetcher.core.node_steps import close
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.replay.accounts import PolicyLogs
from prefetcher.replay.log_tables import orders_table, redundant_orders, residency_table, same, transfers_table, waits_table
from prefetcher.replay.trace import Trace

__all__ = ["TICK_S", "NodeLog", "build_tables", "close_node", "next_rows", "split_by_node"]

TICK_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeLog:
    """The part of a log that one node serves: `rows` are positions in the whole log, in order."""

    node: str
    rows: npt.NDArray[np.int64]
    world: World


def split_by_node(trace: Trace, nodes: int, link_bytes_per_s: float, load_s: npt.NDArray[np.float64] | None) -> list[NodeLog]:
    """Each node's rows and world. A row goes to the node that it names, else to its model's by rendezvous hashing.

    `load_s` float64[n] replaces bytes over link where it is not NaN.
    """
    names = list(trace.node_names) or [f"node-{k}" for k in range(nodes)]
    home = np.array([by_rendezvous(m, names)[0] for m in trace.models], np.int32)
    where = home[trace.model] if not len(trace.node_names) else np.where(trace.node >= 0, trace.node, home[trace.model])
    size = trace.bytes_.astype(np.float64)
    link_s = size / link_bytes_per_s
    if load_s is not None:
        link_s = np.where(np.isnan(load_s), link_s, load_s)
    block_s = BLOCK_BYTES / size * link_s
    out = []
    for k, name in enumerate(names):
        rows = np.flatnonzero(where == k)
        ts, model = trace.ts[rows], trace.model[rows]
        next_ts, first_ts = next_rows(ts, model, len(size))
        world = World(size, link_s, block_s, ts, model, next_ts, first_ts, trace.t0, trace.t1, TICK_S)
        out.append(NodeLog(name, rows, world))
    return out


def next_rows(
    ts: npt.NDArray[np.float64], model: npt.NDArray[np.int32], models: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    order = np.argsort(model, kind="stable")
    following = np.full(len(ts), np.inf)
    alike = model[order[1:]] == model[order[:-1]]
    following[order[:-1][alike]] = ts[order[1:][alike]]
    first = np.full(models, np.inf)
    starts = order[np.flatnonzero(np.r_[True, ~alike])] if len(ts) else order
    first[model[starts]] = ts[starts]
    return following, first


def close_node(rows: int, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> EventLog:
    """Lets running loads finish after the node's last row (it had `rows`), then ends what is held at the log's end."""
    log = run_rows(rows, rows, np.inf, world, demand, hazard, caches, log)
    while not close(world.t1_s, world, demand, caches, log):
        log = grown(log)
    return log


def build_tables(e: int, parts: Sequence[tuple[NodeLog, EventLog]], trace: Trace, shadow: int | None = None) -> PolicyLogs:
    """The four logs of cache `e` over all nodes; `waits` is in the order of the whole log.

    `shadow` is the cache without prefetching that went through the same rows: an order was redundant when the row of its first use found
    the weights ready there. Null where never used, or without a shadow.
    """
    tables: dict[str, list[pa.Table]] = {"residency": [], "transfers": [], "orders": []}
    rows = len(trace)
    wait_s, found, node = np.zeros(rows), np.zeros(rows, np.int8), np.zeros(rows, np.int32)
    for k, (part, log) in enumerate(parts):
        slot = int(log.slot[e])
        wait_s[part.rows], found[part.rows], node[part.rows] = log.wait_s[slot, : len(part.rows)], log.found[slot, : len(part.rows)], k
        t1 = part.world.t1_s
        orders = log.orders[: log.filled[2]]
        held = log.residency[: log.filled[0]]
        held = held[held["cache"] == e]
        n = len(held)
        tables["residency"].append(residency_table(held, orders, same(part.node, n), same("host", n), trace, t1))
        moved = log.transfers[: log.filled[1]]
        moved = moved[moved["cache"] == e]
        n = len(moved)
        link_s = part.world.link_s[moved["model"]]
        places = (same(part.node, n), same("disk", n), same("host", n))
        tables["transfers"].append(transfers_table(moved, orders, link_s, *places, trace))
        mine = orders[orders["cache"] == e]
        n = len(mine)
        ids = [f"{part.node}/{i}" for i in range(n)]
        redundant = redundant_orders(mine, log, shadow)
        tables["orders"].append(orders_table(mine, ids, same(part.node, n), same("host", n), redundant, trace, t1))
    whole = {
        name: pa.concat_tables([t.unify_dictionaries() for t in parts_of]).unify_dictionaries().combine_chunks()
        for name, parts_of in tables.items()
    }
    waits = waits_table(wait_s, found, node, [p.node for p, _ in parts], trace)
    return PolicyLogs(residency=whole["residency"], transfers=whole["transfers"], waits=waits, orders=whole["orders"])
