"""`prefetcher status`: a node in the terminal, once or live. Reads `/v1/status`; shows, and decides nothing.

What matters most comes first: what it earned, what is wrong, then all models and the last prefetches, as many as the window has lines for.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.parse
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prefetcher.api.client import get
from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError, shortened
from prefetcher.report.messages import IdlePin
from prefetcher.report.terminal import idle_line
from prefetcher.words import count, expert, reason, size, span

__all__ = ["render", "show"]

#: Rows of a table where the window sets no bound.
_MOST_MODELS = 200
_MOST_ORDERS = 10
#: Orders that are asked for, so that some are left when those that brought nothing are left out.
_ORDERS_READ = 50
#: Title, frame and header of a table.
_TABLE_LINES = 5
_UNKNOWN_NAMED = 5
#: Why a prefetch moved nothing: the weights were there, or on their way.
_THERE_ALREADY = frozenset({"resident", "moving", "queued", "demanded"})


def show(url: str, *, once: bool, as_json: bool, every_s: float) -> None:
    """Prints the status once, or keeps it on the screen until Ctrl-C. Raises UnavailableError when nobody answers at first."""
    if as_json:
        json.dump(get(url, "/v1/status"), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = Console()
    found = _ask(url)
    if once or not console.is_terminal:
        console.print(render(found))
        return
    clock, never = SystemClock(), threading.Event()

    def fitted(status: dict[str, Any]) -> Group:
        return render(status, console.width, console.height)

    with Live(fitted(found), console=console, screen=False, auto_refresh=False) as live:
        while True:
            clock.wait(never, every_s)
            try:
                live.update(fitted(_ask(url)), refresh=True)
            except UnavailableError as exc:
                live.update(Text(str(exc), style="red"), refresh=True)


def _ask(url: str) -> dict[str, Any]:
    status: dict[str, Any] = get(url, "/v1/status")
    node = urllib.parse.quote(status["node"]["node"], safe="")
    status["orders"] = get(url, f"/v1/orders?count={_ORDERS_READ}&node={node}")
    return status


def render(status: dict[str, Any], width: int | None = None, height: int | None = None) -> Group:
    """The whole status as something that rich prints; with `height`, in at most so many lines of `width` characters."""
    top: list[RenderableType] = [_head(status), _earned(status["totals"]), *_notes(status)]
    models, orders = _models(status), _orders(status)
    if height is None:
        return Group(*top, _model_table(models, _MOST_MODELS), *_order_table(orders, _MOST_ORDERS))
    # The cursor needs a line of its own.
    left = height - 1 - _lines(Group(*top), width or 80)
    of_orders = max(0, min(len(orders), _MOST_ORDERS, left // 3 - _TABLE_LINES))
    left -= of_orders + _TABLE_LINES if of_orders else 0
    of_models = left - _TABLE_LINES
    if of_models < len(models):
        of_models -= 1  # it says how many more there are
    if of_models < 1:
        return Group(*top)
    return Group(*top, _model_table(models, of_models, no_wrap=True), *_order_table(orders, of_orders, no_wrap=True))


def _lines(part: RenderableType, width: int) -> int:
    console = Console(width=width)
    return len(console.render_lines(part, console.options))


def _head(status: dict[str, Any]) -> Text:
    node = status["node"]
    memory = node["memory"]
    mode = "observing: nothing is loaded" if status["observe"] else "prefetching" if status["prefetching"] else "off: demand loading only"
    head = Text(f"{node['node']}  {mode}  {size(memory['taken_bytes'])} of {size(memory['budget_bytes'])} taken")
    head.append(f"  link {size(node['link_bytes_per_s'])}/s, {node['busy_ratio']:.0%} busy\n")
    decides = status.get("decides")
    if not decides:
        return head.append("nothing was decided yet")
    meaning, rows = expert(decides["expert"]), decides.get("learned_rows", 0)
    head.append(f"learned from {count(rows, 'request')}  decided by {decides['expert']}")
    return head.append(f": {meaning}" if meaning else "")


def _notes(status: dict[str, Any]) -> list[Text]:
    """What is wrong, and what was asked for in vain."""
    node = status["node"]
    notes = [*status["problems"], *node["problems"]]
    notes += [idle_line(msgspec.convert(pin, IdlePin), status["now_s"]) for pin in status.get("idle_pins", ())]
    if node["memory"]["warning"]:
        notes.append(node["memory"]["warning"])
    rows, unknown = node.get("unknown_rows", 0), node.get("unknown", ())
    if rows:
        named = ", ".join(f"{shortened(model, 40)} ({asked:,})" for model, asked in unknown[:_UNKNOWN_NAMED])
        more = ", …" if len(unknown) > _UNKNOWN_NAMED else ""
        notes.append(f"{count(rows, 'request')} for models that this node doesn't have: {named}{more}")
    return [Text(note, style="yellow") for note in notes]


def _models(status: dict[str, Any]) -> list[tuple[str, ...]]:
    """What is in memory or on its way, then the other models, used last first."""
    node, now_s = status["node"], status["now_s"]
    waits = {queued["model"]: _who_waits(queued, now_s) for queued in node.get("queued", ())}
    rows: list[tuple[str, ...]] = []
    for held in node["held"]:
        share = held["bytes_done"] / max(1, held["bytes"])
        state = held["state"] if held["state"] == "ready" else f"{held['state']} {share:.0%}"
        if held["state"] == "part":
            state = f"part, {size(held['bytes_done'])}"
        why = held["cause"] + (", pinned" if held["pinned"] else "") + _because(held["contributions"])
        if held["state"] == "part":
            why = "the rest made room" + (", pinned" if held["pinned"] else "")
        if held["model"] in waits:
            why += f", {waits[held['model']]}"
        row = (held["model"], held["tier"], state, size(held["bytes"]), why, span(now_s - held["since_s"]))
        rows.append((*row, _ago(held["last_use_s"], now_s), str(held["leases"])))
    there = {held["model"] for held in node["held"]}
    absent = [known for known in node.get("known", ()) if known["model"] not in there]
    for known in sorted(absent, key=lambda known: (-(known.get("last_use_s") or 0.0), known["model"])):
        why = reason(known["absent"]) if known.get("absent") else "nobody asked yet" if known.get("last_use_s") is None else ""
        if known.get("pinned"):
            why = f"pinned, not loaded: {why}" if why else "pinned, not loaded yet"
        why = waits.get(known["model"], why)
        done = known.get("fetched_bytes")
        state = "" if done is None else f"fetching {done / max(1, known['bytes']):.0%}"
        tier = known.get("tier", "disk")
        rows.append((known["model"], tier, state, size(known["bytes"]), why, "", _ago(known.get("last_use_s"), now_s), ""))
    return rows


def _who_waits(queued: dict[str, Any], now_s: float) -> str:
    """How many wait for a model, for how long, and for which other load."""
    since_s, behind = queued.get("since_s"), queued.get("behind")
    waited = "" if since_s is None else f" {span(now_s - since_s)}"
    verb = "waits" if queued["rows"] == 1 else "wait"
    return f"{queued['rows']} {verb}{waited}" + (f" while {behind} loads" if behind else "")


def _model_table(rows: list[tuple[str, ...]], most: int, *, no_wrap: bool = False) -> Group:
    table = Table(title="Models", title_justify="left", expand=False)
    for column in ("model", "tier", "state", "size", "why", "since", "last use", "leases"):
        table.add_column(column, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    for row in rows[:most]:
        table.add_row(*(Text(cell) for cell in row))
    more = len(rows) - most
    return Group(table, Text(f"and {more:,} more: `prefetcher status --json` has all")) if more > 0 else Group(table)


def _orders(status: dict[str, Any]) -> list[tuple[str, ...]]:
    """The last prefetches that were to bring something; what people loaded is no prefetch."""
    rows: list[tuple[str, ...]] = []
    for order in status["orders"]:
        why = order.get("reason", "")
        if order["cause"] == "manual" or (order.get("outcome") == "superseded" and why in _THERE_ALREADY):
            continue
        outcome = order.get("outcome", "open") + (f": {reason(why)}" if why else "")
        because = _because(order.get("contributions", ())).lstrip(": ")
        rows.append((order["model"], order["cause"], span(status["now_s"] - order["issued_s"]), outcome, because))
    return rows


def _order_table(rows: list[tuple[str, ...]], most: int, *, no_wrap: bool = False) -> list[Table]:
    if not rows or most < 1:
        return []
    table = Table(title="Last prefetches", title_justify="left", expand=False)
    for column in ("model", "cause", "ordered before", "what became of it", "why"):
        table.add_column(column, no_wrap=no_wrap, overflow="ellipsis" if no_wrap else "fold")
    for row in rows[:most]:
        table.add_row(*(Text(cell) for cell in row))
    return [table]


def _earned(totals: dict[str, Any]) -> Text:
    if not totals:
        return Text("nothing earned or wasted yet")
    gb_h = 3.6e12
    outcomes = ", ".join(f"{orders} {name}" for name, orders in sorted(totals["outcomes"].items())) or "none settled"
    used = "" if totals["accuracy"] is None else f" ({totals['accuracy']:.0%} used)"
    from_disk = f", {totals['bypassed']} served from disk" if totals["bypassed"] else ""
    return Text(
        f"{count(totals['rows'], 'request')}, {count(totals['cold_starts'], 'cold start')}{from_disk}, "
        f"{totals['cold_seconds']:.1f} s waited; prefetches: "
        f"{outcomes}{used}; earned {totals['saved_seconds']:.1f} s of loading ahead of use; held "
        f"{totals['held_byte_seconds'] / gb_h:.3f} GB·h, idle {totals['idle_byte_seconds'] / gb_h:.3f}, "
        f"wasted {totals['wasted_byte_seconds'] / gb_h:.3f}"
    )


def _because(contributions: Any) -> str:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in list(contributions)[:2])
    return f": {shares}" if shares else ""


def _ago(then_s: float | None, now_s: float) -> str:
    return "-" if then_s is None else span(now_s - then_s)
