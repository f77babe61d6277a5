"""A report in a terminal: what it says in lines, and its breakdown as a table."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from prefetcher.report.messages import Figures, IdlePin, Report, Slo, StageFigures, Waits
from prefetcher.words import count, printable, span

__all__ = ["idle_line", "shown"]

#: Nodes that something is missing of, in lines; of more their number is told.
_MISSING_SHOWN = 20
#: What requests found is not known by tier.
_UNKNOWN_BY_TIER = frozenset({"cold starts"})
_COLUMNS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("requests", lambda f: f"{f.requests:,}"),
    ("cold starts", lambda f: f"{f.cold_starts:,}"),
    ("cold s", lambda f: f"{f.cold_s:,.1f}"),
    ("p99 first, s", lambda f: _number(f.first_waits.p99_s)),
    ("hit", lambda f: f"{f.hit:,}"),
    ("late", lambda f: f"{f.late:,}"),
    ("useless", lambda f: f"{f.useless:,}"),
    ("displaced", lambda f: f"{f.displaced:,}"),
    ("used", lambda f: _share(f.accuracy)),
    ("held GB·h", lambda f: f"{f.held_gb_h:,.2f}"),
    ("idle", lambda f: f"{f.idle_gb_h:,.2f}"),
    ("wasted", lambda f: f"{f.wasted_gb_h:,.2f}"),
    ("moved GB", lambda f: f"{f.moved_gb:,.1f}"),
)


def shown(report: Report) -> str:
    """The report for people, up to 140 columns wide."""
    # Names are other people's: no markup, and no codes that a terminal obeys.
    console = Console(file=io.StringIO(), width=140, highlight=False, markup=False, emoji=False)
    for line in _lines(report):
        console.print(printable(line))
    if report.groups:
        console.print(_groups(report))
        more = report.groups_in_all - len(report.groups)
        if more > 0:
            console.print(f"and {more:,} more: --most shows them")
    elif report.by == "stage":
        console.print(_stages(report.stages) if report.stages else "nothing was loaded in this time, so no stage was measured")
        more = report.groups_in_all - len({(each.model, each.node) for each in report.stages})
        if more > 0:
            console.print(f"and {more:,} more models on nodes: --most shows them")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _lines(report: Report) -> list[str]:
    total = report.total
    since = "the installation" if report.since_s is None else _time(report.from_hour_s or report.since_s)
    lines = [f"from {since} to {_time(report.until_s)}, {count(len(report.nodes), 'node')}, whole hours"]
    lines += [f"missing: {each.node}: {each.reason}" for each in report.missing[:_MISSING_SHOWN]]
    if len(report.missing) > _MISSING_SHOWN:
        lines.append(f"missing: and of {len(report.missing) - _MISSING_SHOWN:,} more: --json names them")
    lines.append(
        f"{count(total.requests, 'request')}, {count(total.cold_starts, 'cold start')}, {total.joined:,} joined a load, "
        f"{total.bypassed:,} served from below; {total.cold_s:,.1f} s waited in all"
    )
    lines.append(f"waits: {_waits(total.waits)}; first requests in {span(report.first_gap_s)}: {_waits(total.first_waits)}")
    lines.append(_slo(report.slo))
    settled = ", ".join(f"{orders:,} {name}" for name, orders in total.outcomes.items() if orders) or "none"
    used = "" if total.accuracy is None else f" ({_share(total.accuracy)} used, {_share(total.timeliness)} of these in time)"
    lines.append(f"prefetches: {settled}{used}; {total.premature:,} of the unused were premature; they saved {total.saved_s:,.1f} s")
    lines.append(
        f"memory: {total.held_gb_h:,.2f} GB·h held = {total.used_gb_h:,.2f} used + {total.idle_gb_h:,.2f} idle, of which "
        f"{total.wasted_gb_h:,.2f} wasted; {total.early_gb_h:,.2f} ready too early; {total.moved_gb:,.1f} GB moved, "
        f"{total.wasted_moved_gb:,.1f} for nothing"
    )
    if total.coverage is not None:
        lines.append(
            f"without prefetching {total.shadow_requests:,} of the requests would have waited {total.shadow_cold_s or 0.0:,.1f} s, as the "
            f"shadow counts: {total.coverage:.0%} of that was saved"
        )
    else:
        lines.append("what would have been waited without prefetching is not known: no shadow saw a whole hour of this time")
    lines += [idle_line(pin, report.until_s) for pin in report.idle_pins]
    return lines


def idle_line(pin: IdlePin, now_s: float) -> str:
    """A pin that earns too little, in a line."""
    kept = f"{pin.model} on {pin.node}, {pin.bytes / 1e9:,.1f} GB kept by {pin.why if not pin.by else f'a pin of {pin.by}'}"
    cost = f"{pin.held_gb_h:,.1f} GB·h cost {pin.cost_s:.3g} s by the price and saved {pin.earned_s:.3g} s"
    if pin.released_at_s is not None:
        return f"released {span(now_s - pin.released_at_s)} ago: {kept}: {cost}"
    then = (
        "; it is released by itself"
        if pin.allowed
        else f"; `prefetcher unpin {shlex.quote(pin.model)}` gives it back"
        if pin.why == "pin"
        else ""
    )
    return f"worth less than its price for {span(now_s - pin.under_since_s)}: {kept}: {cost}{then}"


def _slo(slo: Slo) -> str:
    limit = f"{100.0 * slo.target_ratio:.4g} % of first requests under {slo.counted_under_s:.3g} s"
    if slo.met_ratio is None:
        return f"objective: {limit}: no first request in this time"
    burns = [f"{rate:.1f} over {over}" for over, rate in (("1 h", slo.burn_1h), ("6 h", slo.burn_6h)) if rate is not None]
    burn = f"; burn rate {', '.join(burns)}" if burns else ""
    verdict = "met" if slo.met_ratio >= slo.target_ratio else "missed"
    return f"objective: {limit}: {verdict}, {slo.met:,} of {slo.count:,} ({slo.met_ratio:.2%}){burn}"


def _waits(waits: Waits) -> str:
    if not waits.count:
        return "none"
    quantiles = ((waits.p50_s, "p50"), (waits.p95_s, "p95"), (waits.p99_s, "p99"))
    return " ".join(f"{name} {_number(value)} s" for value, name in quantiles) + f" ({waits.count:,})"


def _groups(report: Report) -> Table:
    table = Table(report.by or "", *(name for name, _ in _COLUMNS))
    for column in table.columns[1:]:
        column.justify = "right"
    for group in report.groups:
        name = _time(float(group.name)) if report.by == "hour" else printable(group.name)
        hidden = _UNKNOWN_BY_TIER if report.by == "tier" else frozenset()
        table.add_row(name, *("-" if column in hidden else text(group.figures) for column, text in _COLUMNS))
    return table


def _stages(stages: tuple[StageFigures, ...]) -> Table:
    table = Table("model", "node", "stage", "count", "mean, s", "p50, s", "p90, s")
    for each in stages:
        name, node = printable(each.model), printable(each.node)
        if each.count:
            figures = (f"{each.count:,}", _number(each.mean_s), _number(each.p50_s), _number(each.p90_s))
            table.add_row(name, node, each.stage, *figures)
        else:
            table.add_row(name, node, each.stage, "0", each.note)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _time(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
