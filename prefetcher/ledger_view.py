"""`prefetcher ledger rebuild`: ledgers from the outcomes topic, as a table or JSON."""

from __future__ import annotations

import io
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from prefetcher.app import told_streams
from prefetcher.config import Settings
from prefetcher.controller.rebuild import NodeLedger, rebuild_ledgers

__all__ = ["rebuilt"]

_GB_H = 3.6e12


def rebuilt(settings: Settings, *, as_json: bool) -> str:
    """What the topic says about every node.

    Raises:
        UnavailableError: the broker is away, or another process has the folder of the streams.
        UsageError: a folder without streams.
    """
    with told_streams(settings) as streams:
        ledgers, unread = rebuild_ledgers(streams)
    if as_json:
        nodes = {node: _facts(ledger) for node, ledger in sorted(ledgers.items())}
        return msgspec.json.format(msgspec.json.encode({"nodes": nodes, "unread": unread})).decode()
    if not ledgers:
        return f"none of {unread:,} records could be read" if unread else "the outcomes topic is empty: no node has told anything yet"
    table = Table("node", "requests", "cold starts", "cold seconds", "idle GB·h", "wasted GB·h", "orders by outcome")
    for node, ledger in sorted(ledgers.items()):
        totals = ledger.totals
        table.add_row(
            node,
            f"{totals.get('rows', 0):,}",
            f"{totals.get('cold_starts', 0):,}",
            f"{totals.get('cold_seconds', 0.0):,.1f}",
            f"{totals.get('idle_byte_seconds', 0.0) / _GB_H:,.2f}",
            f"{totals.get('wasted_byte_seconds', 0.0) / _GB_H:,.2f}",
            ", ".join(f"{count} {outcome}" for outcome, count in ledger.outcomes().items()) or "none",
        )
    console = Console(file=io.StringIO(), width=120, markup=False, emoji=False)
    console.print(table)
    if unread:
        console.print(f"{unread} records could not be read and are not in it")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _facts(ledger: NodeLedger) -> dict[str, Any]:
    return {"told_at_s": ledger.told_at_s, "totals": ledger.totals, "orders": len(ledger.orders), "outcomes": ledger.outcomes()}
