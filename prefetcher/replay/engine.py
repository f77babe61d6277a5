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
from prefetcher.core.node import BLOCK_BYTES, OUTCOMES, Caches, EventLog, Found, Hazard, World
from prefetcher.core.node_run import grown, run_rows
from prefetcher.core.node_steps import close
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.replay.accounts import SCHEMAS, PolicyLogs
from prefetcher.replay.trace import Trace

__all__ = ["TICK_S", "NodeLog", "build_tables", "close_node", "split_by_node"]

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
        next_ts, first_ts = _next_rows(ts, model, len(size))
        world = World(size, link_s, block_s, ts, model, next_ts, first_ts, trace.t0, trace.t1, TICK_S)
        out.append(NodeLog(name, rows, world))
    return out


def _next_rows(
    ts: npt.NDArray[np.float64], model: npt.NDArray[np.int32], models: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    order = np.argsort(model, kind="stable")
    following = np.full(len(ts), np.inf)
    same = model[order[1:]] == model[order[:-1]]
    following[order[:-1][same]] = ts[order[1:][same]]
    first = np.full(models, np.inf)
    starts = order[np.flatnonzero(np.r_[True, ~same])] if len(ts) else order
    first[model[starts]] = ts[starts]
    return following, first


def close_node(rows: int, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> EventLog:
    """Lets running loads finish after the node's last row (it had `rows`), then ends what is held at the log's end."""
    log = run_rows(rows, rows, np.inf, world, demand, hazard, caches, log)
    while not close(world.t1_s, world, demand, caches, log):
        log = grown(log)
    return log


def _names(codes: npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.int8], names: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names), pa.string()))


def _same(value: str, rows: int) -> pa.Array:
    return _names(np.zeros(rows, np.int32), [value])


def _times(values: npt.NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=~np.isfinite(values))


def _causes(prefetch: npt.NDArray[np.bool_], order: npt.NDArray[np.int64], orders: npt.NDArray[np.void]) -> pa.Array:
    """The cause of each event; `order` is the number of its order where it is a prefetch."""
    hinted = prefetch & orders["hint"][np.where(prefetch, order, 0)] if len(orders) else np.zeros(len(prefetch), np.bool_)
    names = ["demand", "forecast", "hint"] if hinted.any() else ["demand", "forecast"]
    return _names(prefetch.astype(np.int8) + hinted, names)


def _redundant(orders: npt.NDArray[np.void], log: EventLog, shadow: int | None) -> pa.Array:
    if shadow is None:
        return pa.nulls(len(orders), pa.bool_())
    row = orders["first_row"]
    held = log.found[int(log.slot[shadow]), np.maximum(row, 0)] == Found.READY
    return pa.array(held, mask=row < 0)


def build_tables(e: int, parts: Sequence[tuple[NodeLog, EventLog]], trace: Trace, shadow: int | None = None) -> PolicyLogs:
    """The four logs of cache `e` over all nodes; `waits` is in the order of the whole log.

    `shadow` is the cache without prefetching that went through the same rows: an order was redundant when the row of its first use found
    the weights ready there. Null where never used, or without a shadow.
    """
    tables: dict[str, list[pa.Table]] = {"residency": [], "transfers": [], "orders": []}
    rows = len(trace)
    wait_s, found, node = np.zeros(rows), np.zeros(rows, np.int8), np.zeros(rows, np.int32)
    size = trace.bytes_
    for k, (part, log) in enumerate(parts):
        slot = int(log.slot[e])
        wait_s[part.rows], found[part.rows], node[part.rows] = log.wait_s[slot, : len(part.rows)], log.found[slot, : len(part.rows)], k
        t1 = part.world.t1_s
        orders = log.orders[: log.filled[2]]
        held = log.residency[: log.filled[0]]
        held = held[held["cache"] == e]
        end_s = np.where(held["start_s"] < t1, np.minimum(held["end_s"], t1), held["end_s"])
        ready_s = np.where(held["ready_s"] <= end_s, held["ready_s"], np.nan)
        outcome = np.where(held["prefetch"], orders["outcome"][held["order"]] if len(orders) else 0, len(OUTCOMES))
        n = len(held)
        columns = [
            _same(part.node, n), _names(held["model"], trace.models), _same("", n), _same("host", n), _times(held["start_s"]),
            _times(ready_s), _times(np.minimum(held["last_use_s"], end_s)), _times(end_s),
            _causes(held["prefetch"], held["order"], orders), _names(outcome, [*OUTCOMES, "demand"]),
            pa.array(size[held["model"]]),
        ]  # fmt: skip
        tables["residency"].append(pa.Table.from_arrays(columns, names=SCHEMAS["residency"].names).cast(SCHEMAS["residency"]))
        moved = log.transfers[: log.filled[1]]
        moved = moved[moved["cache"] == e]
        n = len(moved)
        moved_bytes = (moved["end_s"] - moved["start_s"]) / part.world.link_s[moved["model"]] * size[moved["model"]]
        moved_bytes = np.minimum(np.rint(moved_bytes), size[moved["model"]]).astype(np.int64)
        columns = [
            _same(part.node, n), _names(moved["model"], trace.models), _same("disk", n), _same("host", n), _times(moved["start_s"]),
            _times(moved["end_s"]), pa.array(moved_bytes), _causes(moved["prefetch"], moved["order"], orders),
        ]  # fmt: skip
        tables["transfers"].append(pa.Table.from_arrays(columns, names=SCHEMAS["transfers"].names).cast(SCHEMAS["transfers"]))
        mine = orders[orders["cache"] == e]
        causes = ["forecast", "hint"] if mine["hint"].any() else ["forecast"]
        n = len(mine)
        columns = [
            pa.array([f"{part.node}/{i}" for i in range(n)], pa.string()), _same(part.node, n), _names(mine["model"], trace.models),
            _same("", n), _same("host", n), _names(mine["hint"].astype(np.int8), causes), _same("treated", n),
            _times(mine["issued_s"]), _times(mine["issued_s"]),
            _times(mine["ready_s"]), _times(mine["first_use_s"]), _times(np.minimum(mine["end_s"], np.maximum(t1, mine["issued_s"]))),
            _names(mine["outcome"], OUTCOMES), pa.array(mine["premature"]), _redundant(mine, log, shadow),
        ]  # fmt: skip
        tables["orders"].append(pa.Table.from_arrays(columns, names=SCHEMAS["orders"].names).cast(SCHEMAS["orders"]))
    waits = pa.Table.from_arrays(
        [
            _times(trace.ts), _names(trace.model, trace.models), _names(node, [p.node for p, _ in parts]), _times(wait_s),
            _names(found, [f.name.lower() for f in Found]),
        ],
        names=SCHEMAS["waits"].names,
    )  # fmt: skip
    whole = {
        name: pa.concat_tables([t.unify_dictionaries() for t in parts_of]).unify_dictionaries().combine_chunks()
        for name, parts_of in tables.items()
    }
    return PolicyLogs(residency=whole["residency"], transfers=whole["transfers"], waits=waits, orders=whole["orders"])
