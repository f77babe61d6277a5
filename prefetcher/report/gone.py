"""Nodes that are forgotten: which may be, and what is kept of them where nothing else keeps it, their hours of the experiment and what
their shadows waited.

Their sums are in the parquet history. One record holds it for all of them, written by one job (`batch.gone_nodes`); what is older than the
store keeps of any node leaves it. Covers no forgetting itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from prefetcher.controller import records
from prefetcher.core.block_sums import BLOCKS_KEPT, BlockSum
from prefetcher.core.totals import HOUR_S
from prefetcher.core.types import NodeName
from prefetcher.ports import StateStore
from prefetcher.report.sums import StoredLedger, decode_ledger

__all__ = ["JOB", "GoneNode", "decode_gone", "ledger_of", "read_gone", "why_stays", "with_gone"]

#: The job that forgets nodes.
JOB = "forget-nodes"


class GoneNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node that was last there at `last_s`. `blocks`: its hours of the experiment, all of them over; `shadow`: by such an hour, what its
    shadow waited in the measured minutes; `shadow_hours`: the same by whole hours since 1970."""

    node: str
    last_s: float
    blocks: tuple[BlockSum, ...] = ()
    shadow: dict[int, float] = {}
    shadow_hours: dict[int, float] = {}


_decoder = msgspec.json.Decoder(list[GoneNode])


def decode_gone(raw: bytes | None) -> list[GoneNode]:
    """The record; empty where there is none. Raises ValueError for something else."""
    return [] if raw is None else records.decode(raw, _decoder)


def read_gone(state: StateStore) -> list[GoneNode]:
    """The nodes that were forgotten; none where the record can't be read. Raises UnavailableError."""
    try:
        return decode_gone(state.read(records.GONE))
    except ValueError:
        return []


def with_gone(before: Sequence[GoneNode], new: Iterable[GoneNode], now_s: float) -> list[GoneNode]:
    """The record with `new` nodes in it, by name; a node that was forgotten before gets both lives. What ended longer ago than hours of
    the experiment are kept is left out."""
    by_name = {each.node: each for each in before}
    for each in new:
        old = by_name.get(each.node)
        if old is not None:
            blocks = {block.block: block for block in (*old.blocks, *each.blocks)}
            each = GoneNode(
                each.node,
                max(old.last_s, each.last_s),
                tuple(blocks[number] for number in sorted(blocks)),
                old.shadow | each.shadow,
                old.shadow_hours | each.shadow_hours,
            )
        by_name[each.node] = each
    since_s = now_s - BLOCKS_KEPT * HOUR_S
    return [by_name[name] for name in sorted(by_name) if by_name[name].last_s >= since_s]


def why_stays(state: StateStore, node: NodeName, now_s: float) -> str:
    """Why `node` can't be forgotten now, or ''.

    Raises:
        UnavailableError: the state store does not answer.
    """
    report, lease, sums = state.read_many([records.node_key(node, what) for what in ("report", "lease", "sums")])
    if report is not None or lease is not None:
        return f"it is alive: it was heard of within {records.REPORT_EXPIRES_S:.0f} s; end its agent first"
    stored = ledger_of(sums)
    last = -1 if stored is None else max((max(hour, written) for hour, _, written in stored.hours), default=-1)
    if last >= int(now_s // HOUR_S):
        # Its name may come back within the hour, and would tell of the same hour again.
        then = f"{datetime.fromtimestamp((last + 1) * HOUR_S, UTC):%H:%M} UTC"
        return f"it told of the hour that runs, which is whole at {then}; it can be forgotten from then on"
    return ""


def ledger_of(raw: bytes | None) -> StoredLedger | None:
    """What is under a node's `sums` key; None where there is nothing that can be read."""
    try:
        return None if raw is None else decode_ledger(raw)
    except ValueError:
        return None
