"""The page of `prefetcher tune`: one file that opens without a network. The same result gives the same bytes.

Style and script are those of a replay's report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from prefetcher.core.types import Window
from prefetcher.core.windows import window_in_words
from prefetcher.replay.report import figure_section, html_table
from prefetcher.replay.report_figures import Figure
from prefetcher.replay.verdict import plain_number

__all__ = ["write_report"]

_METHOD = (
    "The log was gone through hour by hour by shadow caches, the code that decides in production without bytes: one with the windows in "
    "force, and for each segment one for each candidate. Each hour the tuner adds up what each would have cost, older hours counting less, "
    "and changes a window where another one would have cost less by more than chance. Nothing that comes later is known to it. The first "
    "two days are not counted."
)


def write_report(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write the page of a `command.tune` document."""
    from plotly.offline import get_plotlyjs

    figure = _frontier(result)
    drawn = {figure.key: {"data": figure.data, "layout": figure.layout}}
    # `</` would end the script element that holds it.
    figures_json = json.dumps(drawn, ensure_ascii=False, sort_keys=True, allow_nan=False).replace("</", "<\\/")
    here = files("prefetcher.replay")
    given = result["input"]
    head, _, tail = str(result["sentence"]).partition(", the default ")
    lede = (
        f"{given['rows']:,} requests for {given['models']:,} models over {given['days']} days, {result['capacity']} of memory; a GB held "
        f"for an hour is worth {given['price_s_per_gb_h']:g} s of waiting."
    )
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en" data-theme="light">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Windows: {escape(head)}</title>",
            f"<style>{(here / 'report.css').read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            f"<header><span><b>prefetcher</b> windows for {escape(str(given['log']))}</span>",
            '<button id="theme" type="button">Light or dark</button></header>',
            f"<h1>{escape(head)}{f'<small>the default {escape(tail)}</small>' if tail else ''}</h1>",
            f'<p class="lede">{escape(lede)}</p>',
            _segments(result),
            figure_section(figure),
            _changes(result),
            *([_list("What to know", given["notes"])] if given["notes"] else []),
            f"<section><h2>How</h2><p>{escape(_METHOD)}</p></section>",
            "</main>",
            f'<script id="figures" type="application/json">{figures_json}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(here / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )
    Path(path).write_text(page, encoding="utf-8")


def _heads(names: Sequence[str]) -> str:
    return "".join(f'<th scope="col">{escape(name)}</th>' for name in names)


def _row(first: str, rest: Sequence[str]) -> str:
    return f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'


def _segments(result: Mapping[str, Any]) -> str:
    body = "".join(
        _row(s["name"], [f"{s['models']:,}", plain_number(s["rows_per_day"]), s["window"], s["why"], ", ".join(s["examples"])])
        for s in result["segments"]
    )
    table = html_table(_heads(("segment", "models", "requests a day", "window", "why", "such as")), body)
    text = "Models are told apart by their facts; each kind has one window."
    return f"<section><h2>Segments and their windows</h2><p>{text}</p>{table}</section>"


def _changes(result: Mapping[str, Any]) -> str:
    together: dict[tuple[float, str, str], list[str]] = {}
    for change in result["decisions"]:
        window = window_in_words(Window(**change["new"]))
        together.setdefault((change["at_s"], window, change["why"]), []).append(change["segment"])
    said = [f"{datetime.fromtimestamp(at_s, UTC):%d %b %H:%M} UTC, {_segments_in_words(names, result)}: {window}; {why}"
            for (at_s, window, why), names in together.items()]  # fmt: skip
    return _list("What was changed, in order", said or ["nothing: no window would have cost less by more than chance"])


def _segments_in_words(names: Sequence[str], result: Mapping[str, Any]) -> str:
    return "every segment" if len(names) > 1 and len(names) == len(result["segments"]) else "; ".join(names)


def _list(title: str, lines: Sequence[str]) -> str:
    return f"<section><h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul></section>"


def _frontier(result: Mapping[str, Any]) -> Figure:
    """Cold seconds against GB·h held, a point for each window."""
    rows = [*result["frontier"], result["tuned"]]
    data = []
    for name, points, role in (("a window for all models", result["frontier"], "@muted"), ("tuned by segment", [result["tuned"]], "@ours")):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [round(float(p["held_gb_h"]), 3) for p in points],
                "y": [round(float(p["cold_seconds"]), 3) for p in points],
                "customdata": [[p["window"], round(float(p["wasted_gb_h"]), 3)] for p in points],
                "cliponaxis": False,
                "marker": {"color": role, "size": 14 if role == "@ours" else 10, "line": {"color": "@paper", "width": 1}},
                "hovertemplate": "<b>%{customdata[0]}</b><br>%{x:,.4~g} GB·h held, %{customdata[1]:,.4~g} wasted<br>"
                "%{y:,.4~g} s of waiting a day<extra></extra>",
            }
        )
    table = [
        (
            row["window"],
            plain_number(row["held_gb_h"]),
            plain_number(row["wasted_gb_h"]),
            plain_number(row["cold_seconds"]),
            plain_number(row["cost_s"]),
        )
        for row in sorted(rows, key=lambda r: float(r["cost_s"]))
    ]
    return Figure(
        "windows",
        "What windows cost",
        "Down and to the left is better. Each point is one window for all models, left as it is; the large one was tuned by segment.",
        data,
        {"xaxis": {"title": {"text": "GB·h held a day"}}, "yaxis": {}, "showlegend": False},
        ("window", "GB·h held a day", "GB·h wasted a day", "cold seconds a day", "cost, s a day"),
        table,
        "cold seconds a day",
        (("a window for all models", "@muted", "●"), ("tuned by segment", "@ours", "●")),
    )
