"""`prefetcher status`: a node in the terminal, once or live. Reads `/v1/status`; shows, and decides nothing."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefetcher.api.client import get
from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError

__all__ = ["render", "show"]


def show(url: str, *, once: bool, as_json: bool, every_s: float) -> None:
    """Prints the status once, or keeps it on the screen until Ctrl-C. Raises UnavailableError when nobody answers at first."""
    found = get(url, "/v1/status")
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = Console()
    if once or not console.is_terminal:
        console.print(render(found))
        return
    clock, never = SystemClock(), threading.Event()
    with Live(render(found), console=console, screen=False, auto_refresh=False) as live:
        while True:
            clock.wait(never, every_s)
            try:
                live.update(render(get(url, "/v1/status")), refresh=True)
            except UnavailableError as exc:
                live.update(Text(str(exc), style="red"), refresh=True)


def render(status: dict[str, Any]) -> Group:
    """The whole status as something that rich prints."""
    node, totals = status["node"], status["totals"]
    memory = node["memory"]
    mode = "observing" if status["observe"] else "prefetching" if status["prefetching"] else "off: demand loading only"
    head = Text(f"{node['node']}  {mode}  {_bytes(memory['taken_bytes'])} of {_bytes(memory['budget_bytes'])} taken")
    head.append(f"  link {_bytes(node['link_bytes_per_s'])}/s, {node['busy_ratio']:.0%} busy")
    if status.get("decides"):
        head.append(f"  decided by {status['decides']['expert']}")
    notes = [*status["problems"], *node["problems"], *([memory["warning"]] if memory["warning"] else [])]
    return Group(head, *(Text(note, style="yellow") for note in notes), _held(status), _orders(status), _earned(totals))


def _held(status: dict[str, Any]) -> Table:
    table = Table(title="Resident and coming", title_justify="left", expand=False)
    for column in ("model", "tier", "state", "bytes", "why", "since", "last use", "leases"):
        table.add_column(column)
    now_s = status["now_s"]
    for held in status["node"]["held"]:
        share = held["bytes_done"] / max(1, held["bytes"])
        state = held["state"] if held["state"] == "ready" else f"{held['state']} {share:.0%}"
        last = "-" if held["last_use_s"] is None else _ago(now_s - held["last_use_s"])
        why = held["cause"] + (", pinned" if held["pinned"] else "") + _because(held["contributions"])
        row = (held["model"], held["tier"], state, _bytes(held["bytes"]), why)
        table.add_row(*row, _ago(now_s - held["since_s"]), last, str(held["leases"]))
    return table


def _orders(status: dict[str, Any]) -> Table:
    table = Table(title="Last prefetches", title_justify="left", expand=False)
    for column in ("model", "cause", "arm", "issued", "outcome", "why"):
        table.add_column(column)
    for order in status["orders"][:10]:
        outcome = order.get("outcome", "open") + (f" ({order['reason']})" if order.get("reason") else "")
        issued = _ago(status["now_s"] - order["issued_s"])
        because = _because(order.get("contributions", ())).lstrip(": ")
        table.add_row(order["model"], order["cause"], order["arm"], issued, outcome, because)
    return table


def _earned(totals: dict[str, Any]) -> Text:
    if not totals:
        return Text("nothing earned or wasted yet")
    gb_h = 3.6e12
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(totals["outcomes"].items())) or "none settled"
    used = "" if totals["accuracy"] is None else f" ({totals['accuracy']:.0%} used)"
    from_disk = f", {totals['bypassed']} served from disk" if totals["bypassed"] else ""
    return Text(
        f"{totals['rows']} requests, {totals['cold_starts']} cold starts{from_disk}, {totals['cold_seconds']:.1f} s waited; prefetches: "
        f"{outcomes}{used}; earned {totals['saved_seconds']:.1f} s of loading ahead of use; held "
        f"{totals['held_byte_seconds'] / gb_h:.3f} GB·h, idle {totals['idle_byte_seconds'] / gb_h:.3f}, "
        f"wasted {totals['wasted_byte_seconds'] / gb_h:.3f}"
    )


def _because(contributions: Any) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in list(contributions)[:2])
    return f": {shares}" if shares else ""


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
