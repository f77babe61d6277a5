"""What `prefetcher report` does: asks an endpoint, or adds up the outcomes topic, and shows or writes what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from prefetcher.config import Settings
from prefetcher.core.totals import Totals, TotalsKey
from prefetcher.errors import PrefetcherError, UnavailableError, UsageError, shortened
from prefetcher.parquet_files import write_table
from prefetcher.report.messages import BY, Report
from prefetcher.report.tables import Cell, orders_table, sums_table
from prefetcher.report.terminal import shown

__all__ = ["Asked", "asked_of", "rebuilt"]

#: Orders that an endpoint gives at once; the topic has all of them.
_MOST_ORDERS = 10_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for; `parquet` is a folder to write to."""

    since: str
    until: str | None
    by: str | None
    most: int
    as_json: bool = False
    parquet: Path | None = None


class _Row(msgspec.Struct):
    node: str
    key: TotalsKey
    totals: Totals


def asked_of(url: str, asked: Asked) -> str:
    """The report of a running endpoint.

    Raises:
        UnavailableError: nobody answers there.
        UsageError: no such time, or nothing that a report is broken down by.
    """
    from prefetcher.api import client

    window = {"since": asked.since} | ({} if asked.until is None else {"until": asked.until})
    question = window | {"most": str(asked.most)} | ({} if asked.by is None else {"by": asked.by})
    answer = client.get(url, f"/v1/report?{urlencode(question)}")
    try:
        report = msgspec.convert(answer, Report)
    except msgspec.ValidationError as exc:
        raise UnavailableError(f"what answers at {url} gives no report that this program reads: {exc}; is it of another version?") from exc
    written = ""
    if asked.parquet is not None:
        rows = msgspec.convert(client.get(url, f"/v1/report/sums?{urlencode(window)}"), list[_Row], str_keys=True)
        orders = client.get(url, f"/v1/orders?{urlencode({'count': _MOST_ORDERS, 'node': '*'})}")
        written = _write(asked.parquet, {(row.node, 0, row.key): row.totals for row in rows}, _in_window(orders, report))
    return _said(report, asked, written)


def rebuilt(settings: Settings, asked: Asked) -> str:
    """The report from the outcomes topic alone: what is in it is all that is known here, so no shadow and no node that never told.

    Raises:
        UnavailableError: the broker is away, or another process has the folder of the streams.
        UsageError: as `asked_of`, or a folder without streams.
    """
    from prefetcher.app import clock_of, told_streams
    from prefetcher.controller.rebuild import rebuild_ledgers
    from prefetcher.report.build import Question, build_report, hours_of
    from prefetcher.report.desk import time_of

    if asked.by is not None and asked.by not in BY:
        raise UsageError(f"a report is broken down by {', '.join(BY)}, not by {shortened(repr(asked.by))}")
    now_s = clock_of(settings).now_s()
    until_s = now_s if asked.until is None else time_of(asked.until, now_s, "until")
    since_s = time_of(asked.since, now_s, "since") or None
    if since_s is not None and since_s >= until_s:
        raise UsageError(f"since ({asked.since}) must lie before until ({asked.until or 'now'})")
    with told_streams(settings) as streams:
        ledgers, unread = rebuild_ledgers(streams)
    nodes = [ledger.sums for _, ledger in sorted(ledgers.items()) if ledger.sums.seq >= 0]
    limits = settings.report
    question = Question(until_s, since_s, asked.by, asked.most, limits.slo_under_s, limits.slo_target_ratio)
    report = build_report(nodes, question)
    written = ""
    if asked.parquet is not None:
        hours = hours_of(since_s, until_s)
        sums = {(each.node, 0, key): totals for each in nodes for key, totals in each.by_key(hours).items()}
        orders = [msgspec.to_builtins(order) for ledger in ledgers.values() for order in ledger.orders.values()]
        written = _write(asked.parquet, sums, _in_window(orders, report))
    if unread:
        written += f"\n{unread} records could not be read and are not in it"
    return _said(report, asked, written)


def _in_window(orders: Iterable[Mapping[str, Any]], report: Report) -> list[Mapping[str, Any]]:
    return [order for order in orders if (report.since_s or 0.0) <= order["issued_s"] < report.until_s]


def _write(folder: Path, sums: Mapping[Cell, Totals], orders: list[Mapping[str, Any]]) -> str:
    try:
        write_table(folder / "totals.parquet", sums_table(sums))
        write_table(folder / "orders.parquet", orders_table(orders))
    except OSError as exc:
        raise PrefetcherError(f"{folder} can't be written: {exc}; name another folder with --parquet") from exc
    return f"\n{folder}/totals.parquet: {len(sums):,} sums; {folder}/orders.parquet: {len(orders):,} orders"


def _said(report: Report, asked: Asked, more: str) -> str:
    if asked.as_json:
        return msgspec.json.format(msgspec.json.encode(report)).decode()
    return shown(report) + more
