"""The accounts of a policy: every total of the summary, and the limits, from its four logs alone.

Covers the logs' schemas, reading and writing them, and the arithmetic. It knows nothing of how the logs came about, so
that it checks replay as well as it reports it. Intervals are [start, end) in seconds since 1970-01-01 UTC; GB are 1e9
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from prefetcher.core.facts import Ending
from prefetcher.core.outcomes import outcomes_of
from prefetcher.core.types import Cause, Outcome
from prefetcher.errors import InputError

__all__ = ["LOGS", "SCHEMAS", "PolicyLogs", "check_limits", "check_outcomes", "folder_name", "read_logs", "totals", "write_logs"]

_NAME = pa.dictionary(pa.int32(), pa.string())
_TIME = pa.float64()

#: The four logs of a policy, in this order everywhere.
LOGS: tuple[str, ...] = ("residency", "transfers", "waits", "orders")

#: Columns of each log. Times are null where the thing never happened; `end_s` of what is still held is the log's end.
SCHEMAS: dict[str, Any] = {
    "residency": pa.schema(
        [
            ("node", _NAME),
            ("model", _NAME),
            ("version", _NAME),
            ("tier", _NAME),
            ("start_s", _TIME),
            ("ready_s", _TIME),
            ("last_use_s", _TIME),
            ("end_s", _TIME),
            ("cause", _NAME),
            ("outcome", _NAME),
            ("bytes", pa.int64()),
        ]
    ),
    "transfers": pa.schema(
        [
            ("node", _NAME),
            ("model", _NAME),
            ("from_tier", _NAME),
            ("to_tier", _NAME),
            ("start_s", _TIME),
            ("end_s", _TIME),
            ("bytes", pa.int64()),
            ("cause", _NAME),
        ]
    ),
    "waits": pa.schema([("ts", _TIME), ("model", _NAME), ("node", _NAME), ("wait_s", _TIME), ("found", _NAME)]),
    "orders": pa.schema(
        [
            ("decision_id", pa.string()),
            ("node", _NAME),
            ("model", _NAME),
            ("version", _NAME),
            ("tier", _NAME),
            ("cause", _NAME),
            ("arm", _NAME),
            ("issued_s", _TIME),
            ("begin_s", _TIME),
            ("ready_s", _TIME),
            ("first_use_s", _TIME),
            ("end_s", _TIME),
            ("outcome", _NAME),
            ("premature", pa.bool_()),
            ("redundant", pa.bool_()),
        ]
    ),
}

#: Seconds by which times may miss a limit: above what a float64 of today's epoch can tell apart (2.4e-7 s), far below
#: any load.
_TOLERANCE_S = 1e-6
_GB_H = 1e9 * 3600.0
_PERCENTILES = (50.0, 95.0, 99.0)
#: A row that finds one of these finds nothing resident or moving: a miss.
_MISSES = ("absent", "queued")

_ENDING_OF = {
    Outcome.USELESS.value: Ending.GIVEN_UP,
    Outcome.DISPLACED.value: Ending.DISPLACED,
    Outcome.SUPERSEDED.value: Ending.REPLACED,
    Outcome.CANCELLED.value: Ending.CANCELLED,
    Outcome.FAILED.value: Ending.FAILED,
    Outcome.LOST.value: Ending.LOST,
}

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PolicyLogs:
    """The four logs of one policy, as Arrow tables of `SCHEMAS`."""

    residency: Any
    transfers: Any
    waits: Any
    orders: Any


def folder_name(policy: str) -> str:
    """The folder of a policy's logs: its name with `:` written `-`."""
    return policy.replace(":", "-")


def write_logs(folder: str | Path, policy: str, logs: PolicyLogs) -> Path:
    """Write FOLDER/<policy>/{residency,transfers,waits,orders}.parquet; the same tables give the same bytes. Returns
    the folder.
    """
    at = Path(folder) / folder_name(policy)
    at.mkdir(parents=True, exist_ok=True)
    for name in LOGS:
        table = getattr(logs, name).select(SCHEMAS[name].names).cast(SCHEMAS[name]).replace_schema_metadata(None)
        pq.write_table(table, at / f"{name}.parquet", compression="zstd", compression_level=1)
    return at


def read_logs(folder: str | Path, policy: str) -> PolicyLogs:
    """The logs that `write_logs` wrote. Raises InputError when one is missing or has other columns."""
    tables = {}
    for name in LOGS:
        path = Path(folder) / folder_name(policy) / f"{name}.parquet"
        try:
            table = pq.read_table(path)
            tables[name] = table.select(SCHEMAS[name].names).cast(SCHEMAS[name])
        except FileNotFoundError as error:
            raise InputError("there is no such log; run the replay again", path=str(path)) from error
        except (pa.ArrowException, KeyError) as error:
            raise InputError(f"is not a {name} log: {str(error).splitlines()[0]}", path=str(path)) from error
    return PolicyLogs(**tables)


def totals(
    policy: str,
    residency: Any,
    transfers: Any,
    waits: Any,
    orders: Any,
    *,
    scored_from_s: float,
    end_s: float,
    shadow: tuple[Any, Any] | None = None,
) -> dict[str, Any]:
    """The summary's entry for one policy, over the scored time [scored_from_s, end_s]; figures that are undefined are
    None.

    Rows count when their ts is scored, orders when they were issued in it, moved bytes when their segment ended in it,
    and GB·h are clipped to it. `shadow` is (residency, waits) of the same policy without prefetching, row for row;
    without it coverage and pollution are None. Percentiles are interpolated linearly over all scored rows. Raises
    ValueError when the shadow saw other rows.
    """
    scored = _floats(waits, "ts") >= scored_from_s
    wait_s = _floats(waits, "wait_s")[scored]
    p50, p95, p99 = np.percentile(wait_s, _PERCENTILES).tolist() if len(wait_s) else (None, None, None)
    cold_seconds = float(wait_s.sum())
    held, idle, wasted = _gb_hours(residency, scored_from_s, end_s)
    moved = _ints(transfers, "bytes")[_floats(transfers, "end_s") >= scored_from_s]
    counts = _outcomes(orders, scored_from_s)
    used = counts["timely"] + counts["late"]
    decided = sum(counts.values()) - counts["open"] - counts["superseded"] - counts["cancelled"]
    coverage = pollution = None
    if shadow is not None:
        shadow_residency, shadow_waits = shadow
        if shadow_waits.num_rows != waits.num_rows:
            raise ValueError(f"the shadow saw {shadow_waits.num_rows} rows, the policy {waits.num_rows}")
        shadow_cold = float(_floats(shadow_waits, "wait_s")[scored].sum())
        coverage = _ratio(shadow_cold - cold_seconds, shadow_cold)
        polluted = _polluted(residency, waits, shadow_residency, shadow_waits) & scored
        pollution = _ratio(int(polluted.sum()), len(wait_s))
    return {
        "policy": policy,
        "requests": len(wait_s),
        "cold_starts": int((_equals(waits, "found", ("absent",)) & scored).sum()),
        "cold_seconds": cold_seconds,
        "wait_p50_s": p50,
        "wait_p95_s": p95,
        "wait_p99_s": p99,
        "held_gb_h": held,
        "idle_gb_h": idle,
        "wasted_gb_h": wasted,
        "early_gb_h": _early_gb_hours(residency, orders, scored_from_s, end_s),
        "moved_gb": float(moved.sum()) / 1e9,
        "prefetches": sum(counts.values()),
        "outcomes": counts,
        "accuracy": _ratio(used, decided),
        "timeliness": _ratio(counts["timely"], used),
        "coverage": coverage,
        "pollution": pollution,
    }


def check_limits(
    residency: Any,
    transfers: Any,
    capacity_bytes: int | Mapping[str, int],
    link_bytes_per_s: float | Mapping[str, float],
    *,
    tier: str = "host",
    load_seconds: Mapping[str, float] | None = None,
) -> list[str]:
    """What the logs break, one sentence each: bytes in `tier` above a node's capacity, transfers that overlap on a link
    or outrun it.

    A capacity may be given per node, a rate per edge ("disk>host"); each edge of a node is a link of its own,
    remote>disk is one link for all nodes. `load_seconds` are measured times of whole models, which replace bytes over
    link where given.
    """
    return [
        *_over_capacity(residency, capacity_bytes, tier),
        *_link_breaches(transfers, link_bytes_per_s, residency, load_seconds or {}),
    ]


def check_outcomes(orders: Any) -> list[str]:
    """What the orders log breaks, one sentence each: an outcome that the order's times contradict, by the rule that the live ledger has
    (`core.outcomes`).
    """
    found = _codes(orders, "outcome")
    said = [found.name(i) for i in range(orders.num_rows)]
    # Why an unused order ended only its outcome says; whether it was used, and in time, its times do.
    endings = np.array([_ENDING_OF.get(name) for name in said], dtype=object)
    told = outcomes_of(_floats(orders, "ready_s"), _floats(orders, "first_use_s"), endings)
    return [
        f"orders row {i}: it is {name}, and its times say {expected.value}"
        for i, (name, expected) in enumerate(zip(said, told, strict=True))
        if name != expected.value
    ]


# --- GB·h ---


def _gb_hours(residency: Any, from_s: float, to_s: float) -> tuple[float, float, float]:
    """(held, idle, wasted) GB·h of the scored time."""
    size = _ints(residency, "bytes").astype(np.float64)
    start, ready = _floats(residency, "start_s"), _floats(residency, "ready_s")
    end = np.where(np.isnan(_floats(residency, "end_s")), np.inf, _floats(residency, "end_s"))
    last_row = _floats(residency, "last_use_s")
    never_used = np.isnan(last_row)
    # Rows that waited are served when the weights are ready; while these never were, the rows still wait and nothing is
    # idle.
    last_use = np.maximum(last_row, np.where(np.isnan(ready), np.inf, ready))
    idle = size * _overlap(np.where(never_used, start, last_use), end, from_s, to_s)
    prefetched = ~_equals(residency, "cause", (Cause.DEMAND.value,))
    held = size * _overlap(start, end, from_s, to_s)
    return float(held.sum()) / _GB_H, float(idle.sum()) / _GB_H, float(idle[prefetched & never_used].sum()) / _GB_H


def _early_gb_hours(residency: Any, orders: Any, from_s: float, to_s: float) -> float:
    """GB·h of prefetched weights from ready to first use, or to their end where no use came."""
    if orders.num_rows == 0:
        return 0.0
    ready, first_use, end = (_floats(orders, name) for name in ("ready_s", "first_use_s", "end_s"))
    until = np.fmin(first_use, np.where(np.isnan(end), np.inf, end))
    was_ready = ~np.isnan(ready)
    size = _bytes_of(residency, orders)
    return float((size * _overlap(ready, until, from_s, to_s))[was_ready].sum()) / _GB_H


def _bytes_of(residency: Any, orders: Any) -> Floats:
    """float64[orders]: the size of each order's weights, as the residency log has it; 0 where it never took memory."""
    sizes = _ints(residency, "bytes")
    both = [(_codes(residency, name), _codes(orders, name)) for name in ("model", "version")]
    size_of: dict[tuple[str, str], int] = {}
    (model_r, model_o), (version_r, version_o) = both
    for i in np.unique(model_r.index * (len(version_r.names) + 1) + version_r.index, return_index=True)[1].tolist():
        size_of[model_r.name(i), version_r.name(i)] = int(sizes[i])
    return np.array([size_of.get((model_o.name(i), version_o.name(i)), 0) for i in range(orders.num_rows)], dtype=np.float64)


def _overlap(start: Floats, end: Floats, from_s: float, to_s: float) -> Floats:
    """Seconds of each [start, end) that lie in [from_s, to_s); 0 where an end is no number."""
    with np.errstate(invalid="ignore"):
        seconds: Floats = np.nan_to_num(np.maximum(np.minimum(end, to_s) - np.maximum(start, from_s), 0.0))
        return seconds


# --- prefetches ---


def _outcomes(orders: Any, from_s: float) -> dict[str, int]:
    """How many orders issued in the scored time came to each outcome; every outcome is named."""
    issued = _floats(orders, "issued_s") >= from_s
    found = _codes(orders, "outcome")
    counts = np.bincount(found.index[issued] + 1, minlength=len(found.names) + 1)[1:]
    by_name = dict(zip(found.names, counts.tolist(), strict=True))
    return {outcome.value: int(by_name.get(outcome.value, 0)) for outcome in Outcome}


def _polluted(residency: Any, waits: Any, shadow_residency: Any, shadow_waits: Any) -> Bools:
    """bool[rows]: the row misses weights that this policy gave up and that the shadow, which had them by then, still
    holds ready.
    """
    missed = np.flatnonzero(_equals(waits, "found", _MISSES))
    result = np.zeros(waits.num_rows, dtype=np.bool_)
    ts = _floats(waits, "ts")[missed]
    names: dict[tuple[str, str], int] = {}
    given_up = _latest_before(residency, "end_s", _keys(waits, missed, names), ts, names)
    shadow_key = _keys(shadow_waits, missed, names)
    begun = _latest_before(shadow_residency, "start_s", shadow_key, ts, names)
    gave_up_s = np.where(given_up >= 0, _floats(residency, "end_s")[given_up], np.nan) if residency.num_rows else ts * np.nan
    if shadow_residency.num_rows:
        start, ready, end = (_floats(shadow_residency, name)[begun] for name in ("start_s", "ready_s", "end_s"))
        with np.errstate(invalid="ignore"):
            still = (begun >= 0) & (start <= gave_up_s) & (ready <= ts) & (np.isnan(end) | (end > ts))
        result[missed] = still
    return result


def _keys(table: Any, rows: Ints, names: dict[tuple[str, str], int]) -> Ints:
    """int64: one number for each (node, model), the same in every table that shares `names`."""
    node, model = _codes(table, "node"), _codes(table, "model")
    width = len(model.names) + 1
    packed = (node.index[rows] + 1) * width + model.index[rows] + 1
    values, inverse = np.unique(packed, return_inverse=True)
    pairs = [(_name(node.names, v // width - 1), _name(model.names, v % width - 1)) for v in values.tolist()]
    known = np.array([names.setdefault(pair, len(names)) for pair in pairs], dtype=np.int64)
    return known[inverse] if len(known) else np.zeros(0, dtype=np.int64)


def _latest_before(residency: Any, time: str, key: Ints, ts: Floats, names: dict[tuple[str, str], int]) -> Ints:
    """The row of `residency` with the same key and the latest `time` that is not after ts; -1 where there is none.

    Times become ranks, so that (key, time) is one exact integer to search in.
    """
    when = _floats(residency, time)
    rows = np.flatnonzero(~np.isnan(when) & ~np.isnan(_floats(residency, "ready_s")))
    if len(rows) == 0 or len(ts) == 0:
        return np.full(len(ts), -1, dtype=np.int64)
    row_key = _keys(residency, rows, names)
    moments = np.unique(np.concatenate([when[rows], ts]))
    at = row_key * len(moments) + np.searchsorted(moments, when[rows])
    order = np.argsort(at, kind="stable")
    place = np.searchsorted(at[order], key * len(moments) + np.searchsorted(moments, ts), side="right") - 1
    candidate = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (row_key[candidate] == key), rows[candidate], -1)


# --- limits ---


def _over_capacity(residency: Any, capacity_bytes: int | Mapping[str, int], tier: str) -> list[str]:
    node, sizes = _codes(residency, "node"), _ints(residency, "bytes")
    start, end = _floats(residency, "start_s"), _floats(residency, "end_s")
    end = np.where(np.isnan(end), np.inf, end)
    in_tier = _codes(residency, "tier")
    here = np.array([name.lower() == tier.lower() for name in in_tier.names] + [False], dtype=np.bool_)[in_tier.index]
    breaches = [f"residency row {i}: ends before it starts" for i in np.flatnonzero(end < start).tolist()]
    for n, name in enumerate(node.names):
        rows = np.flatnonzero((node.index == n) & here)
        limit = capacity_bytes if isinstance(capacity_bytes, int) else capacity_bytes.get(name, 0)
        times = np.concatenate([end[rows], start[rows]])
        change = np.concatenate([-sizes[rows], sizes[rows]])
        order = np.argsort(times, kind="stable")  # what is given back at a moment goes before what is taken at it
        times, held = times[order], np.cumsum(change[order])
        lasts = np.append(np.diff(times), np.inf) if len(times) else times
        over = np.flatnonzero((held > limit) & (lasts > _TOLERANCE_S))
        if len(over):
            worst = over[np.argmax(held[over])]
            breaches.append(
                f"node {name or '(unnamed)'}: {int(held[worst]):,} bytes at {times[worst]:.6f} s, above its {limit:,}"
                f" ({len(over)} moments above it)"
            )
    return breaches


def _link_breaches(
    transfers: Any, link_bytes_per_s: float | Mapping[str, float], residency: Any, load_seconds: Mapping[str, float]
) -> list[str]:
    if transfers.num_rows == 0:
        return []
    node, source, target = (_codes(transfers, name) for name in ("node", "from_tier", "to_tier"))
    model, sizes = _codes(transfers, "model"), _ints(transfers, "bytes")
    start, end = _floats(transfers, "start_s"), _floats(transfers, "end_s")
    edges = [f"{source.name(i)}>{target.name(i)}".lower() for i in range(transfers.num_rows)]
    edge_index = {edge: i for i, edge in enumerate(sorted(set(edges)))}
    edge = np.array([edge_index[e] for e in edges], dtype=np.int64)
    shared = np.array([e == "remote>disk" for e in sorted(edge_index)], dtype=np.bool_)
    link = edge * (len(node.names) + 1) + np.where(shared[edge], 0, node.index + 1)
    order = np.lexsort((end, start, link))
    same = link[order][1:] == link[order][:-1]
    overlap = np.flatnonzero(same & (start[order][1:] < end[order][:-1] - _TOLERANCE_S))
    breaches = []
    if len(overlap):
        first, second = int(order[overlap[0]]), int(order[overlap[0] + 1])
        breaches.append(
            f"link {edges[first]} of node {node.name(first) or '(unnamed)'}: transfers {first} and {second} overlap at"
            f" {start[second]:.6f} s ({len(overlap)} overlaps)"
        )
    rates = np.array(
        [link_bytes_per_s if isinstance(link_bytes_per_s, int | float) else link_bytes_per_s.get(e, np.inf) for e in sorted(edge_index)]
    )
    least_s = sizes / rates[edge]
    if load_seconds:
        whole = {name: float(size) for name, size in zip(*_model_sizes(residency), strict=True)}
        measured = np.array([load_seconds[m] / whole[m] if m in load_seconds and whole.get(m) else np.nan for m in model.names] + [np.nan])[
            model.index
        ]
        least_s = np.where(np.isnan(measured), least_s, sizes * measured)
    fast = np.flatnonzero(~(end - start >= least_s - _TOLERANCE_S))
    if len(fast):
        i = int(fast[0])
        breaches.append(
            f"link {edges[i]} of node {node.name(i) or '(unnamed)'}: transfer {i} moved {int(sizes[i]):,} bytes in"
            f" {end[i] - start[i]:.6f} s, which takes {least_s[i]:.6f} s ({len(fast)} too fast)"
        )
    return breaches


def _model_sizes(residency: Any) -> tuple[list[str], list[int]]:
    model, sizes = _codes(residency, "model"), _ints(residency, "bytes")
    values, first = np.unique(model.index, return_index=True)
    return [_name(model.names, v) for v in values.tolist()], sizes[first].tolist()


# --- columns ---


@dataclass(frozen=True, slots=True)
class _Codes:
    """A column of names: `index` int64[rows] into `names`, -1 for null."""

    index: Ints
    names: list[str]

    def name(self, row: int) -> str:
        return _name(self.names, int(self.index[row]))


def _name(names: list[str], index: int) -> str:
    return names[index] if index >= 0 else ""


def _codes(table: Any, column: str) -> _Codes:
    values = table.column(column)
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    values = values.unify_dictionaries().combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], _NAME)
    index = values.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return _Codes(np.asarray(index, dtype=np.int64), [name or "" for name in values.dictionary.to_pylist()])


def _equals(table: Any, column: str, wanted: tuple[str, ...]) -> Bools:
    codes = _codes(table, column)
    hit: Bools = np.array([name in wanted for name in codes.names] + [False], dtype=np.bool_)[codes.index]
    return hit


def _floats(table: Any, column: str) -> Floats:
    return np.asarray(table.column(column).cast(pa.float64()).to_numpy(), dtype=np.float64)


def _ints(table: Any, column: str) -> Ints:
    return np.asarray(table.column(column).cast(pa.int64()).to_numpy(), dtype=np.int64)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
