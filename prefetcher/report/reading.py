"""Where a report's sums come from: the state store, and behind it the parquet history.

A node that something is missing of is named, with what and why; nothing is left out in silence. Covers no figures (`report.build`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from prefetcher.controller import records
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import NodeName
from prefetcher.errors import InputError
from prefetcher.ports import StateStore
from prefetcher.report.history import HELD_PART
from prefetcher.report.messages import MissingNode
from prefetcher.report.sums import HourPart, NodeSums, StoredLedger, decode_hour, decode_ledger
from prefetcher.report.tables import read_hours

__all__ = ["Found", "read_nodes"]

#: Keys that are asked for at once.
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Found:
    """Sums by node, and of which nodes something is missing."""

    nodes: Sequence[NodeSums]
    missing: Sequence[MissingNode]


def read_nodes(state: StateStore, history: Path | None, hours: range | None, now_s: float) -> Found:
    """What all nodes that were there in `hours` (None: ever) told of them.

    Raises:
        UnavailableError: the state store does not answer.
        InputError: a file of the history is none.
    """
    names = [NodeName(name) for name in state.members(records.NODES, hours.start * HOUR_S if hours else 0.0)]
    sums, reports = (_read(state, [records.node_key(name, what) for name in names]) for what in ("sums", "report"))
    kept = {} if history is None or not history.is_dir() else read_hours(history, None if hours is None else list(hours))
    found: dict[str, NodeSums] = {}
    missing: list[MissingNode] = []
    for (of, part, key), totals in kept.items():
        found.setdefault(of, NodeSums(of, since_s=key.hour * HOUR_S)).sums[part, key] = totals
    for name, raw, report in zip(names, sums, reports, strict=True):
        past = found.get(name)
        stored = None
        try:
            stored = None if raw is None else decode_ledger(raw)
        except ValueError as exc:
            missing.append(MissingNode(name, f"what it told can't be read ({exc}); look after its agent"))
        if stored is None:
            if raw is None:
                known = "all of it comes from the history" if past is not None else "nothing of it is in the report"
                missing.append(MissingNode(name, f"it told of no hour for nine days, or its agent is of an older version; {known}"))
            continue
        node, gone = _node(state, name, stored, hours, past)
        found[name] = node
        if gone:
            told = f"{len(gone)} of its hours, from {_time(gone[0])} to {_time(gone[-1] + 1)}, are neither in the store nor in the history"
            missing.append(MissingNode(name, told, node.at_s))
        if report is None:
            ends = f"its figures end at {_time(node.at_s / HOUR_S)}"
            missing.append(MissingNode(name, f"it does not report now; {ends}", node.at_s))
    for node_sums in found.values():
        if node_sums.seq < 0:
            node_sums.at_s = max((key.hour + 1) * HOUR_S for _, key in node_sums.sums)
            node_sums.since_s = min(key.hour * HOUR_S for _, key in node_sums.sums)
    return Found(sorted(found.values(), key=lambda each: each.node), sorted(missing, key=lambda each: (each.node, each.reason)))


def _node(
    state: StateStore, name: NodeName, stored: StoredLedger, hours: range | None, past: NodeSums | None
) -> tuple[NodeSums, list[int]]:
    """The node's sums, and the hours that it told of and that are nowhere."""
    wanted: list[HourPart] = sorted({(hour, part) for hour, part, _ in stored.hours if hours is None or hour in hours})
    raw = _read(state, [records.hour_key(name, hour, part) for hour, part in wanted])
    read: dict[HourPart, list[tuple[TotalsKey, Totals]]] = {}
    known = set() if past is None else {(key.hour, part) for part, key in past.sums}
    gone = []
    for place, item in zip(wanted, raw, strict=True):
        try:
            if item is not None:
                sums = decode_hour(item)
                if all(key.hour == place[0] for key, _ in sums):
                    read[place] = sums
                    continue
        except ValueError:
            pass
        if place not in known:
            gone.append(place[0])
    node = NodeSums.stored(name, stored, read)
    if past is not None:
        # A node that was forgotten while its agent went on tells itself what became of the memory that it held then.
        earlier = {
            place: totals for place, totals in past.sums.items() if place[0] != HELD_PART or (place[1].hour + 1) * HOUR_S <= stored.since_s
        }
        node.sums = earlier | node.sums
        node.since_s = min(node.since_s, past.since_s)
    return node, gone


def _read(state: StateStore, keys: Sequence[str]) -> list[bytes | None]:
    found: list[bytes | None] = []
    for i in range(0, len(keys), _AT_ONCE):
        found += state.read_many(keys[i : i + _AT_ONCE])
    return found


def _time(hour: float) -> str:
    """An hour since 1970 as people write it."""
    try:
        return f"{datetime.fromtimestamp(hour * HOUR_S, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError) as exc:
        raise InputError(f"{hour} is no hour") from exc
