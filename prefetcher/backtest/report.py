"""The page of a backtest: one file that opens without a network. The same result gives the same bytes.

Covers words, tables and assembly; what is drawn is `figures`. Style and script are those of a replay's report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from prefetcher.backtest.figures import horizon_figure, reliability_figures, segment_figure
from prefetcher.backtest.terminal import horizon_in_words, main_horizon, of_scores, sentence
from prefetcher.replay.report import figure_section, html_table

__all__ = ["write_report"]

_WORDS = (
    (
        "start",
        "a model without a request in the last so many minutes that has one in the next so many: the only ones that a prefetch can help",
    ),
    ("average precision", "the mean, over all starts, of the share of true ones among the forecasts that were at least as likely"),
    ("Brier score", "mean squared distance of probability and outcome; less is better"),
    ("skill", "how much less that is than by always saying the share that starts; 0 is no skill"),
    ("calibration error", "mean distance of what was said and what came, over groups of forecasts of like probability"),
    ("starts found", "the share of starts that prefetching by probability finds, until its budget of wasted prefetches is spent"),
    ("seasonal-naive", "what was used at this time yesterday and a week ago is used now: the least that a forecast must beat"),
    ("popularity-24h", "what was used most in the last day is used next: what most people would try first"),
    ("95 %", "the interval of the mean over origins, by Student's t; few origins make it wide"),
)
_METHOD = (
    "Predictors run side by side over the log as a controller runs them: rows come in order, each predictor learns from them and fits "
    "when it is due, and at a window's end it is asked about every model that was idle in that window. Nothing that comes later is "
    "known to it. The scored time is cut into stretches, one for each origin, which are compared. Windows are as long as the horizon; "
    "for six hours they are asked for every half hour. Of long logs, windows are drawn by lot. A forecast that a predictor could not "
    "make is left out of its scores and counted."
)


def write_report(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write the page of a `result.result_of` document."""
    from plotly.offline import get_plotlyjs

    figures = [horizon_figure(result), *reliability_figures(result), segment_figure(result)]
    drawn = {f.key: {"data": f.data, "layout": f.layout} for f in figures if f.data}
    # `</` would end the script element that holds it.
    figures_json = json.dumps(drawn, ensure_ascii=False, sort_keys=True, allow_nan=False).replace("</", "<\\/")
    here = files("prefetcher.replay")
    head, _, tail = sentence(result).partition(": ")
    sections = [
        _scores_section(result),
        figure_section(figures[0]),
        *(figure_section(figure) for figure in figures[1:-1]),
        figure_section(figures[-1]),
        _all_section(result),
        _words_section(result),
        _problems_section(result),
        _method_section(result),
    ]
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en" data-theme="light">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Backtest: {escape(head)}</title>",
            f"<style>{(here / 'report.css').read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            f"<header><span><b>prefetcher</b> backtest of {escape(str(result['input']['log']))}</span>",
            '<button id="theme" type="button">Light or dark</button></header>',
            f"<h1>{escape(head)}{f'<small>{escape(tail)}</small>' if tail else ''}</h1>",
            f'<p class="lede">{escape(_lede(result))}</p>',
            *sections,
            "</main>",
            f'<script id="figures" type="application/json">{figures_json}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(here / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )
    Path(path).write_text(page, encoding="utf-8")


def _lede(result: Mapping[str, Any]) -> str:
    given = result["input"]
    days = (given["until_s"] - given["from_s"]) / 86400.0
    scored = (given["until_s"] - given["scored_from_s"]) / 86400.0
    return (
        f"{given['rows']:,} requests for {given['models']:,} models over {days:,.1f} days; the last {scored:,.1f} days are scored, in "
        f"{len(given['origins_s'])} stretches, after a warm-up of {given['warmup_ratio']:.0%}."
    )


def _scores_section(result: Mapping[str, Any]) -> str:
    horizon_s = main_horizon(result)
    entries = of_scores(result, horizon_s)
    baselines = list(result["baselines"])
    heads = [
        "predictor",
        "average precision",
        "95 %",
        *(f"times {b}" for b in baselines),
        "Brier score",
        "skill",
        "calibration error",
        "starts found",
    ]
    body = []
    for i, (name, e) in enumerate(entries.items()):
        interval = e["spread"]["ap"]
        cells = [_number(e["ap"]), _interval(interval)]
        for baseline in baselines:
            over = e["over"].get(baseline)
            cells.append(
                "–" if over is None or over["ap_ratio"] is None else f"{over['ap_ratio']:.2f} ({_interval(over['ap_ratio_spread'], 2)})"
            )
        cells += [
            _number(e["brier"], 4),
            _number(e["brier_skill"]),
            _number(e["ece"], 4),
            "–" if e["recall"] is None else f"{e['recall']:.0%}",
        ]
        body.append(f'<tr class="{"ours" if i == 0 else ""}"><th scope="row">{escape(name)}</th>{_cells(cells)}</tr>')
    wide = len(heads) - 1
    body += [
        f'<tr class="future"><th scope="row">{escape(p["name"])}</th><td colspan="{wide}">no scores: {escape(_why_none(p))}</td></tr>'
        for p in result["predictors"]
        if p["name"] not in entries
    ]
    waste = f"{result['input']['waste']:g}"
    text = f"Starts within {horizon_in_words(horizon_s)}; starts found with at most {waste} wasted prefetches for each start."
    return f"<section><h2>Scores</h2><p>{text}</p>{html_table(_heads(heads), ''.join(body))}</section>"


def _why_none(predictor: Mapping[str, Any]) -> str:
    return "; ".join(f"{reason} ({n:,} times)" for reason, n in predictor["failures"].items()) or "it made no forecast"


def _all_section(result: Mapping[str, Any]) -> str:
    heads = (
        "predictor",
        "within",
        "kind of model",
        "forecasts",
        "starts",
        "average precision",
        "Brier score",
        "calibration error",
        "starts found",
    )
    rows = []
    for e in result["scores"]:
        cells = [
            horizon_in_words(e["horizon_s"]),
            e["segment"],
            f"{e['pairs']:,}",
            f"{e['starts']:,}",
            _number(e["ap"]),
            _number(e["brier"], 4),
        ]
        cells += [_number(e["ece"], 4), "–" if e["recall"] is None else f"{e['recall']:.0%}"]
        rows.append(f'<tr><th scope="row">{escape(e["predictor"])}</th>{_cells(cells)}</tr>')
    table = html_table(_heads(heads), "".join(rows), " small")
    return f"<section><h2>All scores</h2><details><summary>As a table</summary>{table}</details></section>"


def _words_section(result: Mapping[str, Any]) -> str:
    items = [*_WORDS, *((p["name"], p["what"]) for p in result["predictors"] if p["name"] not in dict(_WORDS))]
    body = "".join(f"<dt>{escape(word)}</dt><dd>{escape(what)}</dd>" for word, what in items)
    return f'<section><h2>How to read this</h2><div class="card pad"><dl class="words">{body}</dl></div></section>'


def _problems_section(result: Mapping[str, Any]) -> str:
    notes = list(result["input"]["notes"])
    for p in result["predictors"]:
        notes += [f"{p['name']} fell back {n:,} times: {reason}" for reason, n in p["fallbacks"].items()]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    what = f'<div class="card pad"><ul>{items}</ul></div>' if items else ""
    said = "What was left out, failed or fell back." if items else "Nothing was left out, and nothing failed."
    return f"<section><h2>Problems</h2><p>{said}</p>{what}</section>"


def _method_section(result: Mapping[str, Any]) -> str:
    drawn = ", ".join(f"{ratio:.0%} of those of {horizon_in_words(float(h))}" for h, ratio in result["drawn_ratio"].items() if ratio < 1.0)
    text = _METHOD + (f" Here: {drawn}." if drawn else " Here: all of them.")
    rows = "".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th><td>{escape(_setting(value))}</td></tr>'
        for key, value in result["input"].items()
        if key != "notes"
    )
    settings = f"<details><summary>Settings</summary>{html_table('', rows, ' small settings')}</details>"
    return f"<section><h2>How this was computed</h2><p>{escape(text)}</p>{settings}</section>"


def _setting(value: Any) -> str:
    return ", ".join(f"{v:.0f}" for v in value) if isinstance(value, list) else f"{value}"


def _heads(heads: Any) -> str:
    return "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)


def _cells(cells: list[str]) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _interval(found: Mapping[str, Any] | None, digits: int = 3) -> str:
    return "–" if found is None or found["low"] is None else f"{found['low']:.{digits}f} to {found['high']:.{digits}f}"
