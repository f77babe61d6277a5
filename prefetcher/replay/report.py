"""`report.html`: one file that opens without a network and says what a replay found, to people who will decide on it.

Covers the page's words, tables and assembly; what is drawn is `report_figures`, the sentences at the top `verdict`, what the words
of its tables mean `report_words`. The same replay gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from prefetcher.replay.accounts import PolicyLogs
from prefetcher.replay.frontier import FrontierPoint, knows_future
from prefetcher.replay.policies import policy_in_words
from prefetcher.replay.report_figures import (
    Figure,
    compare_models,
    frontier_figure,
    models_figure,
    scored_waits,
    waits_figure,
    week_figure,
)
from prefetcher.replay.report_tiers import places_in_words, tiers_tables, unfit_in_words
from prefetcher.replay.report_words import HOW_TO_READ
from prefetcher.replay.trace import Trace
from prefetcher.replay.verdict import Verdict, best_rival, judge, named, plain_number

__all__ = ["figure_section", "html_table", "write_report"]

#: Lines that can still be told apart in the chart of waits.
_CURVES = 6

_UNIT = re.compile(r"(\d) (%|s\b|GB\b)")

_METHOD = (
    "Every policy was run over the log by a simulation with a virtual clock; {ours} is the code that decides in "
    "production. A request waits from its arrival until its model's weights are ready, also when it joins a "
    "load that is under way. A node's link into each of its memories moves one model at a time; loads for waiting requests "
    "go before prefetches. Memory counts from the start of a transfer. Decisions use nothing that lies ahead of "
    "them, but for the policies in italics. The four logs beside this page hold every wait, transfer, residency "
    "and prefetch; all figures here can be computed from them."
)


def write_report(
    path: str | Path,
    summary: Mapping[str, Any],
    tables_by_policy: Mapping[str, PolicyLogs],
    frontier_points: Sequence[FrontierPoint],
    trace: Trace,
    *,
    tz: str | None = None,
    ours: str = "ours",
) -> Verdict:
    """Write the report of a replay and return its verdict.

    `summary` is `{"input", "policies"}` as in summary.json, its input with `scored_from_s`, `end_s` and, where there is
    one, `price`. `frontier_points` are ours at other prices; the policies' own points are added. `tz` is the zone of
    the week's hours, the log's unless given. Only the few policies that are drawn are taken from `tables_by_policy`.
    """
    described, policies = summary["input"], list(summary["policies"])
    scored_from_s, hours = described["scored_from_s"], (described["end_s"] - described["scored_from_s"]) / 3600.0
    price = described.get("price")
    shown = _shown(policies, ours)
    rows_of = {
        policy: scored_waits(tables_by_policy[policy], scored_from_s, trace.models) for policy in shown if policy in tables_by_policy
    }
    rival = best_rival(policies, ours)
    today = "lru" if "lru" in rows_of else rival["policy"] if rival else ""
    compared = []
    if ours in rows_of and today in rows_of:
        compared = [compare_models(rows_of[ours][:2], rows_of[today][:2], today, len(trace.models))]
    verdict = judge(policies, hours, price_s_per_gb_h=price or 0.0, frontier=frontier_points, models=compared, ours=ours)
    points = [FrontierPoint(p["policy"], p["held_gb_h"], p["cold_seconds"], price if p["policy"] == ours else None) for p in policies]
    points += [
        p
        for p in frontier_points
        if (p.policy, p.held_gb_h, p.cold_seconds) not in {(q.policy, q.held_gb_h, q.cold_seconds) for q in points}
    ]
    figures = [
        frontier_figure(points, hours or 1.0, shown),
        waits_figure({policy: wait for policy, (_, wait, _) in rows_of.items()}, shown),
    ]
    pair = [p for p in (ours, rival["policy"] if rival else None) if p in rows_of]
    if len(pair) == 2:
        mine, theirs = rows_of[pair[0]], rows_of[pair[1]]
        figures.append(models_figure(mine[:2], theirs[:2], pair[1], trace.models, trace.bytes_))
    cold_ts = {policy: rows_of[policy][2] for policy in pair or list(rows_of)[:1]}
    requests = max((p["requests"] for p in policies), default=0)
    figures.append(week_figure(cold_ts, scored_from_s, described["end_s"], tz or trace.tz, requests))
    page = _page(verdict, described, policies, hours, figures, trace, ours)
    Path(path).write_text(page, encoding="utf-8")
    return verdict


def _shown(policies: Sequence[Mapping[str, Any]], ours: str) -> list[str]:
    """The policies that get a curve: ours, the best rival, lru, then the best of the rest, at most `_CURVES`."""
    rival = best_rival(policies, ours)
    by_waiting = [p["policy"] for p in sorted(policies, key=lambda p: (p["cold_seconds"], p["policy"]))]
    first = [ours, rival["policy"] if rival else ours, "lru", *by_waiting]
    return [p for p in dict.fromkeys(first) if p in by_waiting][:_CURVES]


def _page(
    verdict: Verdict,
    described: Mapping[str, Any],
    policies: Sequence[Mapping[str, Any]],
    hours: float,
    figures: Sequence[Figure],
    trace: Trace,
    ours: str,
) -> str:
    from plotly.offline import get_plotlyjs

    drawn = {f.key: {"data": f.data, "layout": f.layout} for f in figures if f.data}
    # `</` would end the script element that holds it.
    figures_json = json.dumps(drawn, ensure_ascii=False, sort_keys=True, allow_nan=False).replace("</", "<\\/")
    head, _, tail = verdict.line.partition("; ")
    here = files("prefetcher.replay")
    by_key = {f.key: f for f in figures}
    sections = [_table_section(policies, hours, ours), _sources_section(verdict, policies, hours, ours), _words_section(policies)]
    sections.insert(1, _tiers_section(policies, hours, ours))
    sections += [figure_section(by_key[key]) for key in ("frontier", "waits", "models", "week") if key in by_key]
    sections += [_problems_section(trace, described.get("notes", ())), _method_section(described, ours)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en" data-theme="light">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Replay: {escape(verdict.line)}</title>",
            f"<style>{(here / 'report.css').read_text(encoding='utf-8')}</style></head>",
            "<body><main>",
            f"<header><span><b>prefetcher</b> replay of {escape(str(described.get('log', trace.path)))}</span>",
            '<button id="theme" type="button">Light or dark</button></header>',
            f"<h1>{_unbroken(head)}{f'<small>{_unbroken(tail)}</small>' if tail else ''}</h1>",
            f'<p class="lede">{escape(_lede(described, policies, hours, trace))}</p>',
            _facts(verdict, policies, hours, ours),
            *sections,
            "</main>",
            f'<script id="figures" type="application/json">{figures_json}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(here / 'report.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )


def _lede(described: Mapping[str, Any], policies: Sequence[Mapping[str, Any]], hours: float, trace: Trace) -> str:
    span = f"{plain_number(hours / 24)} days" if hours >= 48 else f"{plain_number(hours)} hours"
    scored = f", with {policies[0]['requests']:,} requests," if policies else ""
    text = f"A simulation over {len(trace):,} requests for {len(trace.models):,} models; the last {span}{scored} are scored"
    if described.get("warmup_ratio"):
        text += f", after a warm-up of {described['warmup_ratio']:.0%}"
    if "tiers" in described:
        text += f", on {places_in_words(described['tiers'], described['nodes'])}"
    return text + ". No weights were moved to make this page."


def _facts(verdict: Verdict, policies: Sequence[Mapping[str, Any]], hours: float, ours: str) -> str:
    mine = next((p for p in policies if p["policy"] == ours), None)
    rival = next((p for p in policies if p["policy"] == verdict.rival), None)
    if mine is None or rival is None or hours <= 0:
        return ""
    others = [p for p in policies if p["policy"] == "lru" and p is not rival] + [rival]

    def beside(key: str, per: float) -> str:
        return ", ".join(f"{plain_number(p[key] / per)} with {escape(named(p['policy']))}" for p in others)

    cards = [
        ("Waiting", mine["cold_seconds"] / hours, "s an hour", beside("cold_seconds", hours)),
        ("Cold starts", mine["cold_starts"], f"of {mine['requests']:,}", beside("cold_starts", 1)),
        ("Held", mine["held_gb_h"] / hours, "GB, mean", beside("held_gb_h", hours)),
        (
            "Held and idle",
            mine["idle_gb_h"] / hours,
            "GB, mean",
            f"{beside('idle_gb_h', hours)}; {plain_number(mine['wasted_gb_h'] / hours)} in prefetches never used",
        ),
    ]
    inner = "".join(
        f"<div><dt>{title}</dt><dd>{plain_number(value)} <span>{unit}</span></dd><p>{text}</p></div>" for title, value, unit, text in cards
    )
    return f'<dl class="facts">{inner}</dl>'


def _table_section(policies: Sequence[Mapping[str, Any]], hours: float, ours: str) -> str:
    most = max((p["cold_seconds"] for p in policies), default=0.0) or 1.0
    head = (
        "policy",
        "waiting, s an hour",
        "cold starts",
        "p50, s",
        "p95, s",
        "p99, s",
        "GB held",
        "GB idle",
        "GB wasted",
        "GB early",
    )
    more = ("GB moved in all", "prefetches", "accuracy", "timeliness", "coverage", "pollution")
    body = []
    for p in sorted(policies, key=lambda p: (p["cold_seconds"], p["policy"])):
        kind = "ours" if p["policy"] == ours else "future" if knows_future(p["policy"]) else ""
        width = 100 * p["cold_seconds"] / most
        cells = [f'<td class="bar">{_cell(_over(p["cold_seconds"], hours))}<i style="width:{width:.1f}%"></i></td>']
        texts = [f"{p['cold_starts']:,}", *(_cell(p[f"wait_{q}_s"]) for q in ("p50", "p95", "p99"))]
        texts += [_cell(_over(p[f"{part}_gb_h"], hours)) for part in ("held", "idle", "wasted", "early")]
        texts += [_cell(p["moved_gb"]), f"{p['prefetches']:,}"]
        texts += [_percent(p[ratio]) for ratio in ("accuracy", "timeliness", "coverage", "pollution")]
        cells += [f"<td>{text}</td>" for text in texts]
        body.append(f'<tr class="{kind}"><th scope="row">{escape(p["policy"])}</th>{"".join(cells)}</tr>')
    heads = "".join(f'<th scope="col">{escape(h)}</th>' for h in (*head, *more))
    future = " Those in italics know the future: what is possible, not what can be run." if any(
        knows_future(p["policy"]) for p in policies
    ) else ""  # fmt: skip
    return (
        "<section><h2>What would have been saved</h2><p>All policies over the same requests, the least waiting "
        f"first; GB are means over the scored time.{future}</p>{html_table(heads, ''.join(body))}</section>"
    )


def _tiers_section(policies: Sequence[Mapping[str, Any]], hours: float, ours: str) -> str:
    tables = tiers_tables(policies, hours, ours)
    if not tables:
        return ""
    apart = unfit_in_words(policies, ours)
    said = f"<p>{_unbroken(apart[0].upper() + apart[1:])}.</p>" if apart else ""
    return f"<section><h2>Tiers and nodes</h2>{said}{''.join(f'<p>{what}</p>{html_table(*of)}' for what, *of in tables)}</section>"


def _sources_section(verdict: Verdict, policies: Sequence[Mapping[str, Any]], hours: float, ours: str) -> str:
    """Where the saving comes from: the second sentence, and ours without fetching ahead between the rivals and ours."""
    if not verdict.why:
        return ""
    steps = [p for p in policies if p["policy"] in ("lru", verdict.rival)]
    steps.sort(key=lambda p: -p["cold_seconds"])
    rows = [(named(p["policy"]), p["cold_seconds"] / hours) for p in steps if hours > 0]
    mine = next(p for p in policies if p["policy"] == ours)
    if hours > 0 and verdict.ahead_s_per_h is not None:
        rows.append((f"{ours}, without fetching ahead", mine["cold_seconds"] / hours + verdict.ahead_s_per_h))
    rows += [(ours, mine["cold_seconds"] / hours)] if hours > 0 else []
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{_waiting(waits)}</td></tr>' for name, waits in rows)
    heads = '<th scope="col">policy</th><th scope="col">waiting, s an hour</th>'
    why = verdict.why[0].upper() + verdict.why[1:]
    return f"<section><h2>Where the saving comes from</h2><p>{_unbroken(why)}.</p>{html_table(heads, body, ' small')}</section>"


def _words_section(policies: Sequence[Mapping[str, Any]]) -> str:
    does = [(p["policy"], policy_in_words(p["policy"])) for p in sorted(policies, key=lambda p: (p["cold_seconds"], p["policy"]))]
    items = [*HOW_TO_READ, *((name, what) for name, what in does if what)]
    body = "".join(f"<dt>{escape(word)}</dt><dd>{escape(what)}</dd>" for word, what in items)
    return f'<section><h2>How to read this</h2><div class="card pad"><dl class="words">{body}</dl></div></section>'


def html_table(heads: str, body: str, kind: str = "") -> str:
    """A table in a card; `heads` and `body` are cells and rows of HTML."""
    head = f"<thead><tr>{heads}</tr></thead>" if heads else ""
    return f'<div class="card scroll{kind}" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def figure_section(figure: Figure) -> str:
    """A figure's title, note, chart and the same as a table."""
    chart = ""
    if figure.data:
        label = escape(f"{figure.title}. {figure.note} The same as a table follows.", quote=True)
        keys = "".join(
            f'<li><span style="color:var(--{role[1:]})" aria-hidden="true">{mark}</span> {escape(name)}</li>'
            for name, role, mark in figure.legend
        )
        chart = (
            '<div class="card">'
            + (f'<ul class="legend">{keys}</ul>' if keys else "")
            + (f'<p class="above">{escape(figure.above)}</p>' if figure.above else "")
            + f'<div class="chart" id="chart-{figure.key}" role="img" aria-label="{label}"></div></div>'
        )
    table = ""
    if figure.rows:
        heads = "".join(f'<th scope="col">{escape(h)}</th>' for h in figure.head)
        body = "".join(
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
            for first, *rest in figure.rows
        )
        table = f"<details><summary>As a table</summary>{html_table(heads, body, ' small')}</details>"
    return f"<section><h2>{escape(figure.title)}</h2><p>{escape(figure.note)}</p>{chart}{table}</section>"


def _problems_section(trace: Trace, notes: Sequence[str]) -> str:
    lines = trace.problems.lines()
    if trace.zoneless:
        lines.append(f"{trace.zoneless:,} times have no zone and were read as {trace.tz}")
    items = "".join(f"<li>{escape(line)}</li>" for line in [*lines, *notes])
    what = f'<div class="card pad"><ul>{items}</ul></div>' if items else ""
    said = f"Of {trace.rows_read:,} rows read, {len(trace):,} were replayed."
    said += "" if lines else " Nothing was wrong with them."
    return f"<section><h2>Problems in the log</h2><p>{said}</p>{what}</section>"


def _method_section(described: Mapping[str, Any], ours: str) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(key.replace("_", " "))}</th><td>{escape(_setting(value))}</td></tr>'
        for key, value in described.items()
        if key not in ("problems", "first_problems", "notes")
    )
    return (
        f"<section><h2>How this was computed</h2><p>{escape(_METHOD.format(ours=ours))}</p>"
        f"<details><summary>Settings</summary>{html_table('', rows, ' small settings')}</details></section>"
    )


def _unbroken(text: str) -> str:
    """`text` for HTML; no line ends between a number and its unit."""
    return _UNIT.sub("\\1&nbsp;\\2", escape(text))


def _waiting(s_per_h: float) -> str:
    """To a tenth also where that is a small part, so that steps between policies are seen."""
    return f"{s_per_h:,.1f}" if s_per_h >= 10 else plain_number(s_per_h)


def _setting(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_setting, value)) or "none"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return str(value)


def _over(value: float, hours: float) -> float | None:
    return value / hours if hours > 0 else None


def _cell(value: float | None) -> str:
    return "–" if value is None else plain_number(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
