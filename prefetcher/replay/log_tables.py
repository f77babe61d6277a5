"""Rows of the four logs from the kernels' events: codes become names, times that never were become null.

Who wrote the events, one node's caches or a cluster's, is for the callers, which say the node and tier of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefetcher.core.facts import Ending
from prefetcher.core.node import OUTCOMES, EventLog, Found
from prefetcher.core.outcomes import outcomes_of
from prefetcher.replay.accounts import SCHEMAS
from prefetcher.replay.trace import Trace

__all__ = ["coded", "orders_table", "outcome_codes", "redundant_orders", "residency_table", "same", "transfers_table", "waits_table"]


#: Why an order ended that the kernels' code is for, None where it did not, or was used.
_ENDINGS = np.array(
    [{"useless": Ending.GIVEN_UP, "displaced": Ending.DISPLACED, "cancelled": Ending.CANCELLED}.get(name) for name in OUTCOMES],
    dtype=object,
)


def coded(codes: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> pa.Array:
    """`codes` int[k] as names."""
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names), pa.string()))


def same(value: str, rows: int) -> pa.Array:
    """One name for every row."""
    return coded(np.zeros(rows, np.int32), [value])


def _times(values: npt.NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=~np.isfinite(values))


def _causes(prefetch: npt.NDArray[np.bool_], order: npt.NDArray[np.int64], orders: npt.NDArray[np.void]) -> pa.Array:
    """The cause of each event; `order` is the number of its order where it is a prefetch."""
    hinted = prefetch & orders["hint"][np.where(prefetch, order, 0)] if len(orders) else np.zeros(len(prefetch), np.bool_)
    names = ["demand", "forecast", "hint"] if hinted.any() else ["demand", "forecast"]
    return coded(prefetch.astype(np.int8) + hinted, names)


def redundant_orders(orders: npt.NDArray[np.void], log: EventLog, shadow: int | None) -> pa.Array:
    """Whether cache `shadow` held the weights ready when the row of each order's first use came; null where never used or without one."""
    if shadow is None:
        return pa.nulls(len(orders), pa.bool_())
    row = orders["first_row"]
    held = log.found[int(log.slot[shadow]), np.maximum(row, 0)] == Found.READY
    return pa.array(held, mask=row < 0)


def outcome_codes(orders: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """int64[len(orders)]: the outcome of each order, as the ledger's rule has it, into `OUTCOMES`. Of what the kernels say, it takes the
    times and why an unused order ended."""
    ending = _ENDINGS[orders["outcome"]]
    number = {name: code for code, name in enumerate(OUTCOMES)}
    found = outcomes_of(orders["ready_s"], orders["first_use_s"], ending)
    return np.array([number[outcome.value] for outcome in found], np.int64)


def residency_table(
    held: npt.NDArray[np.void], orders: npt.NDArray[np.void], node: pa.Array, tier: pa.Array, trace: Trace, t1: float
) -> pa.Table:
    """The residency log of `held`; `orders` are all, `node` and `tier` say where."""
    end_s = np.where(held["start_s"] < t1, np.minimum(held["end_s"], t1), held["end_s"])
    ready_s = np.where(held["ready_s"] <= end_s, held["ready_s"], np.nan)
    outcome = np.where(held["prefetch"], outcome_codes(orders)[held["order"]] if len(orders) else 0, len(OUTCOMES))
    columns = [
        node, coded(held["model"], trace.models), same("", len(held)), tier, _times(held["start_s"]),
        _times(ready_s), _times(np.minimum(held["last_use_s"], end_s)), _times(end_s),
        _causes(held["prefetch"], held["order"], orders), coded(outcome, [*OUTCOMES, "demand"]),
        pa.array(np.rint(held["bytes"]).astype(np.int64)),
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, names=SCHEMAS["residency"].names).cast(SCHEMAS["residency"])


def transfers_table(
    moved: npt.NDArray[np.void],
    orders: npt.NDArray[np.void],
    link_s: npt.NDArray[np.float64],
    node: pa.Array,
    from_tier: pa.Array,
    to_tier: pa.Array,
    trace: Trace,
) -> pa.Table:
    """The log of transfers; `link_s` float64[len(moved)] is what the whole of each would take."""
    size = trace.bytes_
    moved_bytes = (moved["end_s"] - moved["start_s"]) / link_s * size[moved["model"]]
    moved_bytes = np.minimum(np.rint(moved_bytes), size[moved["model"]]).astype(np.int64)
    columns = [
        node, coded(moved["model"], trace.models), from_tier, to_tier, _times(moved["start_s"]),
        _times(moved["end_s"]), pa.array(moved_bytes), _causes(moved["prefetch"], moved["order"], orders),
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, names=SCHEMAS["transfers"].names).cast(SCHEMAS["transfers"])


def orders_table(
    mine: npt.NDArray[np.void], ids: Sequence[str], node: pa.Array, tier: pa.Array, redundant: pa.Array, trace: Trace, t1: float
) -> pa.Table:
    """The log of one cache's orders."""
    kinds = ["forecast", "hint"] if mine["hint"].any() else ["forecast"]
    n = len(mine)
    columns = [
        pa.array(ids, pa.string()), node, coded(mine["model"], trace.models),
        same("", n), tier, coded(mine["hint"].astype(np.int8), kinds), same("treated", n),
        _times(mine["issued_s"]), _times(mine["issued_s"]),
        _times(mine["ready_s"]), _times(mine["first_use_s"]), _times(np.minimum(mine["end_s"], np.maximum(t1, mine["issued_s"]))),
        coded(outcome_codes(mine), OUTCOMES), pa.array(mine["premature"]), redundant,
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, names=SCHEMAS["orders"].names).cast(SCHEMAS["orders"])


def waits_table(
    wait_s: npt.NDArray[np.float64], found: npt.NDArray[np.int8], node: npt.NDArray[np.integer[Any]], nodes: Sequence[str], trace: Trace
) -> pa.Table:
    """The log of waits, in the order of the whole log."""
    return pa.Table.from_arrays(
        [
            _times(trace.ts),
            coded(trace.model, trace.models),
            coded(node, nodes),
            _times(wait_s),
            coded(found, [f.name.lower() for f in Found]),
        ],
        names=SCHEMAS["waits"].names,
    )
