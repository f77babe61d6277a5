"""What the page of a backtest draws: precision by horizon, reliability, and kinds of models, each as a chart and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefetcher.backtest.scores import FEWEST_STARTS
from prefetcher.backtest.terminal import horizon_in_words, main_horizon, of_scores
from prefetcher.replay.report_figures import Figure

__all__ = ["horizon_figure", "reliability_figures", "segment_figure"]

_MARKS = (
    ("circle", "●"),
    ("square", "■"),
    ("triangle-up", "▲"),
    ("diamond", "◆"),
    ("x", "✕"),
    ("triangle-down", "▼"),
    ("star", "★"),
    ("cross", "✚"),
)
#: Horizons whose reliability is drawn; a table has all.
_DRAWN_S = (600.0, 3600.0, 21600.0)
#: Below this a probability is drawn at it: a log scale has no zero.
_LEAST_P = 1e-4


def horizon_figure(result: Mapping[str, Any]) -> Figure:
    """Average precision of each predictor by horizon, with the 95 % interval over origins."""
    horizons = [float(h) for h in result["horizons_s"]]
    names = _in_order(result)
    data, rows = [], []
    for i, name in enumerate(names):
        entries = [of_scores(result, h).get(name) for h in horizons]
        y = [None if e is None else e["ap"] for e in entries]
        half = [_half(e) for e in entries]
        data.append(
            _line(i, name, [horizon_in_words(h) for h in horizons], y)
            | {"error_y": {"type": "data", "array": half, "color": _role(i, name), "thickness": 1, "width": 3}}
        )
        rows.append([name, *("–" if v is None else f"{v:.3f} ± {h:.3f}" if h else f"{v:.3f}" for v, h in zip(y, half, strict=True))])
    starts = [max((e["starts"] for e in of_scores(result, h).values()), default=0) for h in horizons]
    rows.append(["starts", *(f"{n:,}" for n in starts)])
    layout = {"xaxis": _axis("within", type="category"), "yaxis": _axis("", rangemode="tozero"), "showlegend": False}
    note = "Higher is better; 1 is perfect, and who knows nothing has the share of candidates that start. Bars: 95 % over origins."
    heads = ["predictor", *map(horizon_in_words, horizons)]
    return Figure("horizons", "How well starts are foreseen", note, data, layout, heads, rows, "average precision", _legend(names))


def reliability_figures(result: Mapping[str, Any]) -> list[Figure]:
    """Said and seen probability, a chart for each of a few horizons."""
    made = []
    names = [name for name in _in_order(result) if result["reliability"].get(name)]
    for horizon_s in _DRAWN_S:
        key = f"{horizon_s:g}"
        data: list[dict[str, Any]] = [
            {
                "type": "scatter",
                "mode": "lines",
                "x": [_LEAST_P, 1],
                "y": [_LEAST_P, 1],
                "line": {"color": "@line", "width": 2},
                "hoverinfo": "skip",
            }
        ]
        rows = []
        for i, name in enumerate(names):
            bins = result["reliability"][name].get(key)
            if not bins:
                continue
            entry = of_scores(result, horizon_s)[name]
            if entry["starts"] < FEWEST_STARTS:
                continue
            line = _line(i, name, [max(p, _LEAST_P) for p, _, _ in bins], [max(was, _LEAST_P) for _, was, _ in bins])
            line["customdata"] = [n for _, _, n in bins]
            line["hovertemplate"] = f"<b>{name}</b><br>said %{{x:.2~%}}, seen %{{y:.2~%}}<br>%{{customdata:,}} forecasts<extra></extra>"
            data.append(line)
            rows += [[name, f"{p:.4f}", f"{was:.4f}", f"{n:,}"] for p, was, n in bins]
        if not rows:
            continue
        within = horizon_in_words(horizon_s)
        log = {"type": "log", "range": [-4, 0], "dtick": 1, "tickformat": "~%"}
        layout = {"xaxis": _axis("probability said (log scale)", **log), "yaxis": _axis("", **log), "showlegend": False}
        note = f"A use within {within}: on the line, what was said is what came. Below it, a predictor says too much; above it, too little."
        heads = ["predictor", "said", "seen", "forecasts"]
        title = f"Reliability within {within}"
        made.append(Figure(f"reliability-{key}", title, note, data, layout, heads, rows, "share that came (log scale)", _legend(names)))
    return made


def segment_figure(result: Mapping[str, Any]) -> Figure:
    """Average precision by kind of model at the main horizon."""
    horizon_s = main_horizon(result)
    of = {segment: of_scores(result, horizon_s, segment) for segment in result["segments"]}
    shown = [segment for segment, entries in of.items() if any(e["ap"] is not None for e in entries.values())]
    names = _in_order(result)
    data = [
        {
            "type": "bar",
            "name": name,
            "x": shown,
            "y": [(of[segment].get(name) or {}).get("ap") for segment in shown],
            "marker": {"color": _role(i, name)},
            "hovertemplate": f"<b>{name}</b><br>%{{x}}: %{{y:.3f}}<extra></extra>",
        }
        for i, name in enumerate(names)
    ]
    rows = []
    for segment, meaning in result["segments"].items():
        best = next(iter(of[segment].values()), None)
        pairs, starts = (best["pairs"], best["starts"]) if best else (0, 0)
        figures = [_figure((of[segment].get(name) or {}).get("ap")) for name in names]
        rows.append([f"{segment}: {meaning}", f"{pairs:,}", f"{starts:,}", *figures])
    layout = {"barmode": "group", "xaxis": _axis("", type="category"), "yaxis": _axis("", rangemode="tozero"), "showlegend": False}
    within = horizon_in_words(horizon_s)
    note = f"Starts within {within}, by what was known of a model at the moment; kinds with under {FEWEST_STARTS} starts are left empty."
    heads = ["kind of model", "forecasts", "starts", *names]
    return Figure(
        "segments", "Which models are foreseen", note, data if shown else [], layout, heads, rows, "average precision", _legend(names)
    )


def _in_order(result: Mapping[str, Any]) -> list[str]:
    """Predictors with scores, the best at the main horizon first."""
    return list(of_scores(result, main_horizon(result)))


def _line(i: int, name: str, x: Sequence[Any], y: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": _role(i, name), "width": 2},
        "marker": {"color": _role(i, name), "size": 8, "symbol": _MARKS[i % len(_MARKS)][0]},
        "hovertemplate": f"<b>{name}</b><br>%{{x}}: %{{y:.3f}}<extra></extra>",
    }


def _role(i: int, _name: str) -> str:
    """The best one has ours' colour, the others theirs in turn."""
    return "@ours" if i == 0 else f"@peer{(i - 1) % 6 + 1}"


def _legend(names: Sequence[str]) -> list[tuple[str, str, str]]:
    return [(name, _role(i, name), _MARKS[i % len(_MARKS)][1]) for i, name in enumerate(names)]


def _axis(title: str, **more: Any) -> dict[str, Any]:
    lines = {"gridcolor": "@line", "zerolinecolor": "@line", "linecolor": "@line"}
    return {"title": {"text": title, "standoff": 10}} | lines | more


def _half(entry: Mapping[str, Any] | None) -> float:
    interval = None if entry is None else entry["spread"]["ap"]
    return 0.0 if interval is None or interval["low"] is None else (interval["high"] - interval["low"]) / 2.0


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
