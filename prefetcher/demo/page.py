"""The demo's results: a table in the terminal, and a page with pictures that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from prefetcher.demo.side import Side
from prefetcher.demo.traffic import DAY_S

__all__ = ["ROWS", "figures", "table", "write_page"]

_COLOURS = ("#b7791f", "#0b7d6f")


def _outcomes(side: Side) -> str:
    found = side.readings[-1].outcomes if side.readings else {}
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()) if count) or "none"


#: What is compared: the words, and how a side says it.
ROWS: tuple[tuple[str, Callable[[Side], str]], ...] = (
    ("requests served", lambda s: f"{len(s.served):,}"),
    ("failed", lambda s: f"{len(s.failed):,}"),
    ("cold starts", lambda s: f"{s.cold_starts:,}"),
    ("cold seconds (real)", lambda s: f"{s.cold_seconds:.2f}"),
    ("wait p50", lambda s: f"{1000 * s.percentile_s(50):.1f} ms"),
    ("wait p95", lambda s: f"{1000 * s.percentile_s(95):.1f} ms"),
    ("held GB·h", lambda s: f"{s.held_gb_h:.2f}"),
    ("idle GB·h", lambda s: f"{s.idle_gb_h:.2f}"),
    ("wasted GB·h", lambda s: f"{s.wasted_gb_h:.2f}"),
    ("prefetches", _outcomes),
)


def table(sides: Sequence[Side]) -> Table:
    """The comparison for the terminal."""
    made = Table(title="Two days, the same requests")
    made.add_column("")
    for side in sides:
        made.add_column(side.name, justify="right")
    for words, say in ROWS:
        made.add_row(words, *(say(side) for side in sides))
    return made


def figures(sides: Sequence[Side]) -> dict[str, dict[str, Any]]:
    """Plotly figures by key: requests that waited by hour, waits by percentile, memory over time."""
    hours = np.arange(0, 2 * DAY_S + 1, 3600.0)
    cold, waits, memory = [], [], []
    for side, colour in zip(sides, _COLOURS, strict=False):
        at = [s.at_s for s in side.served if s.found != "ready"]
        counts = np.histogram(at, hours)[0]
        x = list(range(len(counts)))
        cold.append({"type": "bar", "name": side.name, "x": x, "y": counts.tolist(), "marker": {"color": colour}})
        share = np.linspace(0, 100, 201)
        ms = np.percentile(side.waits_s, share) * 1000 if side.served else np.zeros(len(share))
        waits.append(_line(side.name, share.tolist(), np.round(ms, 3).tolist(), colour))
        start_s = side.readings[0].now_s if side.readings else 0.0
        at_h = [round((r.now_s - start_s) / 3600.0, 3) for r in side.readings]
        memory.append(_line(side.name, at_h, [r.taken_bytes / 1e9 for r in side.readings], colour))
    return {
        "cold": {"data": cold, "layout": _layout("hour of the two days", "requests that waited")},
        "waits": {"data": waits, "layout": _layout("percentile of requests", "real wait, ms", log=True)},
        "memory": {"data": memory, "layout": _layout("hour of the two days", "GB in host memory")},
    }


def _line(name: str, x: list[float], y: list[float], colour: str) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": {"color": colour}}


def _layout(x: str, y: str, *, log: bool = False) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "type": "log" if log else "linear"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 62, "r": 18, "t": 20, "b": 50},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }


def write_page(path: Path, sides: Sequence[Side], verdict: Sequence[str], notes: Sequence[str]) -> None:
    """Writes the page; nothing in it is fetched from anywhere. `verdict`: what came of it, in sentences."""
    from plotly.offline import get_plotlyjs

    drawn = json.dumps(figures(sides), allow_nan=False).replace("</", "<\\/")
    head = "".join(f"<th>{escape(side.name)}</th>" for side in sides)
    rows = "".join(
        f"<tr><th>{escape(words)}</th>" + "".join(f"<td>{escape(say(side))}</td>" for side in sides) + "</tr>" for words, say in ROWS
    )
    titles = {"cold": "When requests waited", "waits": "Waits", "memory": "Memory held"}
    charts = "".join(f'<section><h2>{words}</h2><div class="card chart" id="{key}"></div></section>' for key, words in titles.items())
    css = (files("prefetcher.replay") / "report.css").read_text(encoding="utf-8")
    script = "for (const [k, f] of Object.entries(JSON.parse(document.getElementById('drawn').textContent)))"
    script += " Plotly.newPlot(k, f.data, f.layout, {responsive: true, displayModeBar: false});"
    page = (
        '<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>prefetcher demo</title>'
        f"<style>{css} th, td {{ white-space: normal; }}</style></head>"
        "<body><main><header><b>prefetcher</b> demo</header><h1>Two days of requests on real weights</h1>"
        + "".join(f'<p class="lede"><b>{escape(line)}</b></p>' for line in verdict)
        + f'<p class="lede">{escape(" ".join(notes))}</p>'
        f'<div class="card scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody>'
        f"</table></div>{charts}</main>"
        f'<script id="drawn" type="application/json">{drawn}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>"
    )
    path.write_text(page, encoding="utf-8")
