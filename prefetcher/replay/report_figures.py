"""What the report draws, worked out from logs: shares of waits, models' gains, the week's cold starts, and each as a
chart and a table.

A chart is plotly's JSON; a colour that begins with `@` is a role that the page fills in for light or dark. Pages are
`report`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefetcher.replay.accounts import PolicyLogs
from prefetcher.replay.frontier import FrontierPoint, knows_future, lower_hull
from prefetcher.replay.verdict import ModelsCompared, plain_number
from prefetcher.words import count

__all__ = [
    "Figure",
    "compare_models",
    "frontier_figure",
    "models_figure",
    "role_of",
    "scored_waits",
    "waits_figure",
    "week_figure",
]

OURS = "ours"
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: Models that are named on each side of the chart of gains and losses.
_MODELS_SHOWN = 10
#: Waits below this are drawn at it: a log scale has no zero, and nobody notices a tenth of a second.
_LEAST_WAIT_S = 0.1
#: A model whose waits add up to less of a difference is served alike: times of today's epoch are exact to a microsecond only.
_ALIKE_S = 1e-3
#: Of fewer requests, or of less than a day, hours of a week say nothing.
_LEAST_WEEK_REQUESTS = 100
_LEAST_WEEK_HOURS = 24.0
#: An hour of the week that was seen for less is left empty: its mean would be a few minutes', multiplied.
_LEAST_SEEN_H = 0.5
#: Symbols, so that points are told apart without their colour.
_SYMBOLS = ("square", "triangle-up", "x", "diamond", "cross", "triangle-down", "star", "pentagon")
_MARKS = ("■", "▲", "✕", "◆", "✚", "▼", "★", "⬟")


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart and the same as a table; `note` says in a sentence what is to be seen; without data nothing is drawn.

    `above` names the vertical axis, `legend` has the (name, colour role, mark) of each series; the page sets both as
    text, which wraps on a phone.
    """

    key: str
    title: str
    note: str
    data: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    above: str = ""
    legend: Sequence[tuple[str, str, str]] = ()


def role_of(policy: str, shown: Sequence[str]) -> str:
    """The colour role of a policy: ours is one, what knows the future another, the others take theirs in turn."""
    if policy == OURS:
        return "@ours"
    if knows_future(policy):
        return "@future"
    others = [p for p in shown if p != OURS and not knows_future(p)]
    return f"@peer{others.index(policy) % 6 + 1}" if policy in others else "@muted"


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 10},
        "gridcolor": "@line",
        "zerolinecolor": "@line",
        "linecolor": "@line",
    } | more


def _rounded(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if v != v else float(f"{v:.6g}") for v in values.tolist()]


def frontier_figure(points: Sequence[FrontierPoint], hours: float, shown: Sequence[str]) -> Figure:
    """Cold seconds an hour against mean GB held: a point per policy, ours over prices, the lower hull of ours."""
    per_hour = [(p, p.held_gb_h / hours, p.cold_seconds / hours) for p in points]
    data: list[dict[str, Any]] = []
    hull = lower_hull([p for p in points if p.policy == OURS])
    if len(hull) > 1:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "ours, lower hull",
                "x": _rounded(np.array([p.held_gb_h for p in hull]) / hours),
                "y": _rounded(np.array([p.cold_seconds for p in hull]) / hours),
                "line": {"color": "@ours", "width": 2, "dash": "dot"},
                "hoverinfo": "skip",
            }
        )
    for i, policy in enumerate(dict.fromkeys(p.policy for p in points)):
        own = [(p, gb, s) for p, gb, s in per_hour if p.policy == policy]
        said = [f"price {p.price:g} s per GB·h" if p.price is not None else "" for p, _, _ in own]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": policy,
                "x": _rounded(np.array([gb for _, gb, _ in own])),
                "y": _rounded(np.array([s for _, _, s in own])),
                "customdata": said,
                "cliponaxis": False,
                "marker": {
                    "color": role_of(policy, shown),
                    "size": 12 if policy == OURS else 10,
                    "symbol": "circle" if policy == OURS else _SYMBOLS[i % len(_SYMBOLS)],
                    "line": {"color": "@paper", "width": 1},
                },
                "hovertemplate": f"<b>{policy}</b><br>%{{x:,.4~g}} GB held<br>%{{y:,.4~g}} s of waiting an hour"
                "<br>%{customdata}<extra></extra>",
            }
        )
    layout = {
        "xaxis": _axis("GB held, mean", rangemode="tozero"),
        "yaxis": _axis("", rangemode="tozero"),
        "showlegend": False,
    }
    rows = [(p.policy, "" if p.price is None else f"{p.price:g}", plain_number(gb), plain_number(s)) for p, gb, s in per_hour]
    note = "Down and to the left is better. The dotted line is what ours reaches at other prices of memory."
    if len(hull) <= 1:
        note = "Down and to the left is better. Ours was replayed at one price only, so it has one point and no line."
    legend = [
        (policy, role_of(policy, shown), "●" if policy == OURS else _MARKS[i % len(_MARKS)])
        for i, policy in enumerate(dict.fromkeys(p.policy for p in points))
    ]
    head = ("policy", "price, s per GB·h", "GB held", "s an hour")
    above = "seconds of waiting an hour"
    return Figure("frontier", "Waiting against memory", note, data, layout, head, rows, above, legend)


def waits_figure(waits_of: Mapping[str, npt.NDArray[np.float64]], shown: Sequence[str]) -> Figure:
    """The share of requests that wait longer than a time, both on a log scale; a table of percentiles."""
    longest = max((float(w.max()) for w in waits_of.values() if len(w)), default=0.0)
    title, head = "How long requests wait", ("policy", "waits at all", "p50", "p90", "p99", "p99.9", "longest")
    if longest <= 0:
        return Figure("waits", title, "No request waits under any policy.", head=head)
    at = np.geomspace(_LEAST_WAIT_S, max(longest, 2 * _LEAST_WAIT_S), 160)
    data, rows = [], []
    for policy, waits in waits_of.items():
        if not len(waits):
            continue
        ordered = np.sort(waits)
        share = 1.0 - np.searchsorted(ordered, at, side="right") / len(ordered)
        seen = share > 0
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": policy,
                "x": _rounded(at[seen]),
                "y": _rounded(share[seen] * 100),
                "line": {
                    "color": role_of(policy, shown),
                    "width": 3 if policy == OURS else 1.75,
                    "dash": "dash" if knows_future(policy) else "solid",
                    "shape": "hv",
                },
                "hovertemplate": f"<b>{policy}</b><br>%{{y:.3~g}} % of requests wait over %{{x:.3~g}} s<extra></extra>",
            }
        )
        quantiles = np.percentile(ordered, [50, 90, 99, 99.9, 100])
        waiting = float(np.mean(ordered > 0)) * 100
        rows.append((policy, f"{plain_number(waiting)} %", *(f"{plain_number(float(q))} s" for q in quantiles)))
    layout = {
        "xaxis": _axis("wait, seconds (log scale)", type="log", dtick=1),
        "yaxis": _axis("", type="log", dtick=1, ticksuffix=" %"),
        "showlegend": False,
    }
    note = "A lower line is better: of all scored requests, the share that waits longer than a time."
    legend = [(p, role_of(p, shown), "- -" if knows_future(p) else "—") for p in waits_of]
    return Figure("waits", title, note, data, layout, head, rows, "share of requests that wait longer (log scale)", legend)


def compare_models(
    ours: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
    other: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
    other_name: str,
    models: int,
) -> ModelsCompared:
    """How many of `models` wait less with ours than with the other, longer, and alike; each side is (model of each row, wait of each row).
    Models without a row are not counted.
    """
    saved = _waits_by_model(other, models) - _waits_by_model(ours, models)
    requests = np.bincount(ours[0], minlength=models)
    less, longer, all_of_them = saved > _ALIKE_S, saved < -_ALIKE_S, max(1, int(requests.sum()))
    alike = ~less & ~longer & (requests > 0)
    ratios = (float(requests[side].sum() / all_of_them) for side in (less, longer))
    return ModelsCompared(other_name, int(less.sum()), int(longer.sum()), int(alike.sum()), *ratios)


def _waits_by_model(side: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]], models: int) -> npt.NDArray[np.float64]:
    return np.bincount(side[0], weights=side[1], minlength=models).astype(np.float64)


def models_figure(
    ours: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
    rival: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]],
    rival_name: str,
    models: Sequence[str],
    sizes: npt.NDArray[np.int64],
) -> Figure:
    """Seconds of waiting that ours saves per model against the rival; each side is (model of each row, wait of each
    row).
    """
    mine, theirs = _waits_by_model(ours, len(models)), _waits_by_model(rival, len(models))
    requests = np.bincount(ours[0], minlength=len(models))
    saved = theirs - mine
    order = np.argsort(-saved, kind="stable")
    gains, losses = order[saved[order] > _ALIKE_S], order[::-1][saved[order[::-1]] < -_ALIKE_S]
    counts = compare_models(ours, rival, rival_name, len(models))
    less = f"{count(counts.less, 'model waits', 'models wait')} less than with {rival_name}"
    note = f"{less}, {counts.longer} longer, {counts.alike} as long."
    chosen = [*gains[:_MODELS_SHOWN].tolist(), *losses[:_MODELS_SHOWN][::-1].tolist()]
    head = ("model", "GB", "requests", "waits with ours", f"waits with {rival_name}", "saved")
    if not chosen:
        return Figure("models", "Which models profit, and which don't", note, head=head)
    chosen.reverse()
    short = [_shortened(models[i]) for i in chosen]
    layout = {
        "xaxis": _axis("seconds of waiting saved"),
        "yaxis": {
            "automargin": True,
            "tickmode": "array",
            "tickvals": list(range(len(chosen))),
            "ticktext": short,
            "linecolor": "@line",
        },
        "height": 120 + 26 * len(chosen),
        "bargap": 0.35,
    }
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": _rounded(saved[np.array(chosen)]),
        "y": list(range(len(chosen))),
        "customdata": [[models[i], f"{sizes[i] / 1e9:,.3g}", int(requests[i])] for i in chosen],
        "marker": {"color": ["@ours" if saved[i] > 0 else "@loss" for i in chosen]},
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{x:,.4~g} s saved<br>%{customdata[1]} GB, %{customdata[2]:,} requests<extra></extra>",
    }
    rows = [
        (
            models[i],
            plain_number(sizes[i] / 1e9),
            f"{requests[i]:,}",
            f"{plain_number(float(mine[i]))} s",
            f"{plain_number(float(theirs[i]))} s",
            f"{plain_number(float(saved[i]))} s",
        )
        for i in reversed(chosen)
    ]
    return Figure("models", "Which models profit, and which don't", note, [bars], layout, head, rows)


def week_figure(cold_ts: Mapping[str, npt.NDArray[np.float64]], from_s: float, to_s: float, tz: str, requests: int) -> Figure:
    """When in the week cold starts fall, by local hour: their mean number in such an hour of [from_s, to_s), one map a
    policy. Only a note where the scored `requests` or hours are too few.
    """
    title, head = "When cold starts fall", ("policy", "day", *(f"{h:02d}" for h in range(24)))
    scored_h = (to_s - from_s) / 3600.0
    if requests < _LEAST_WEEK_REQUESTS or scored_h < _LEAST_WEEK_HOURS:
        note = (
            f"Left out: {requests:,} requests in {plain_number(scored_h)} hours are scored, and {_LEAST_WEEK_REQUESTS} requests"
            " in a day are the least that says anything about hours of the week."
        )
        return Figure("week", title, note, head=head)
    # Each minute of the scored time tells how often an hour of the week occurs in it, so that half weeks don't mislead.
    there = _by_hour(np.arange(from_s, to_s, 60.0), tz) / 60.0
    seen = there >= _LEAST_SEEN_H
    grids = {policy: np.where(seen, _by_hour(ts, tz), 0) / np.maximum(there, _LEAST_SEEN_H) for policy, ts in cold_ts.items()}
    most = max((float(g.max()) for g in grids.values()), default=0.0)
    if not most:
        return Figure("week", title, "There were no cold starts in the scored time.", head=head)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "height": 120 + 235 * len(grids),
        "annotations": [],
        "margin": {"l": 48, "r": 12, "t": 30, "b": 64},
    }
    rows = []
    step = 1.0 / len(grids)
    for i, (policy, grid) in enumerate(grids.items()):
        axis = "" if i == 0 else str(i + 1)
        top = 1.0 - i * step
        data.append(
            {
                "type": "heatmap",
                "z": [_rounded(line) for line in np.where(seen, grid, np.nan)],
                "x": list(range(24)),
                "y": list(DAYS),
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "coloraxis": "coloraxis",
                "xgap": 2,
                "ygap": 2,
                "hovertemplate": f"<b>{policy}</b><br>%{{y}} %{{x}}:00-%{{x}}:59<br>%{{z:.3~g}} cold starts in the hour<extra></extra>",
            }
        )
        hours = {
            "tickmode": "array",
            "tickvals": list(range(0, 24, 3)),
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        }
        layout[f"xaxis{axis}"] = hours | {
            "anchor": f"y{axis}",
            "title": {"text": f"hour of the day, {tz}"} if i == len(grids) - 1 else {},
        }
        layout[f"yaxis{axis}"] = {
            "autorange": "reversed",
            "domain": [top - step * 0.78, top - step * 0.04],
            "showgrid": False,
            "fixedrange": True,
        }
        layout["annotations"].append(
            {
                "text": f"<b>{policy}</b>  {len(cold_ts[policy]):,} cold starts",
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": top - step * 0.03,
            }
            | {"xanchor": "left", "yanchor": "bottom", "showarrow": False, "font": {"color": "@ink", "size": 13}}
        )
        texts = np.where(seen, np.vectorize(plain_number, otypes=[object])(grid), "–")
        rows += [(policy, day, *line) for day, line in zip(DAYS, texts.tolist(), strict=True)]
    layout["coloraxis"] = {
        "cmin": 0,
        "cmax": most,
        "colorscale": [[0, "@heat0"], [0.5, "@heat1"], [1, "@heat2"]],
        "colorbar": {
            "title": {"text": "cold starts an hour", "side": "top"},
            "orientation": "h",
            "thickness": 10,
            "len": 0.5,
            "x": 1,
            "xanchor": "right",
        }
        | {"y": 0, "yanchor": "top", "yref": "paper", "ypad": 34, "outlinewidth": 0, "nticks": 4},
    }
    layout["margin"] = {"l": 48, "r": 12, "t": 30, "b": 110}
    return Figure("week", title, f"The mean number of cold starts in each hour of the week, {tz}.", data, layout, head, rows)


def scored_waits(logs: PolicyLogs, scored_from_s: float, models: Sequence[str]) -> tuple[Any, Any, Any]:
    """(model int64, wait float64, ts of cold starts float64) of the scored rows of one policy."""
    waits = logs.waits
    ts = np.asarray(waits.column("ts").to_numpy(), dtype=np.float64)
    scored = ts >= scored_from_s
    model = pc.index_in(waits.column("model").cast(pa.string()), pa.array(models, pa.string()))
    index = np.asarray(model.fill_null(0).to_numpy(), dtype=np.int64)
    absent = np.asarray(pc.equal(waits.column("found").cast(pa.string()), "absent").fill_null(False).to_numpy(), dtype=np.bool_)
    return index[scored], np.asarray(waits.column("wait_s").to_numpy(), dtype=np.float64)[scored], ts[scored & absent]


def _by_hour(ts: npt.NDArray[np.float64], tz: str) -> npt.NDArray[np.int64]:
    """int64[7, 24]: how many of `ts` fall on each weekday and hour of the zone."""
    local = pa.array((ts * 1e6).astype(np.int64), pa.timestamp("us", "UTC")).cast(pa.timestamp("us", tz))
    day = np.asarray(pc.day_of_week(local).to_numpy(zero_copy_only=False), dtype=np.int64)
    hour = np.asarray(pc.hour(local).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.bincount(day * 24 + hour, minlength=7 * 24).reshape(7, 24)


def _shortened(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else f"{name[: limit // 2 - 1]}…{name[-limit // 2 :]}"
