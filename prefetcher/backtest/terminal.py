"""What a backtest prints: a sentence, and tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["horizon_in_words", "main_horizon", "of_scores", "sentence", "tables"]

#: The horizon that is told first: what a prefetch of the usual hold is for.
_MAIN_S = 600.0
_FRAME = 3


def horizon_in_words(seconds: float) -> str:
    """As 10 min or 6 h."""
    return f"{seconds / 3600:g} h" if seconds >= 3600.0 else f"{seconds / 60:g} min"


def main_horizon(result: Mapping[str, Any]) -> float:
    """Ten minutes, or the longest shorter horizon that was scored."""
    scored = [float(h) for h in result["horizons_s"]]
    return max((h for h in scored if h <= _MAIN_S), default=scored[0])


def of_scores(result: Mapping[str, Any], horizon_s: float, segment: str = "all") -> dict[str, Mapping[str, Any]]:
    """Each predictor's entry at a horizon and segment, in the order of average precision, what has none last."""
    found = [e for e in result["scores"] if e["horizon_s"] == horizon_s and e["segment"] == segment]
    found.sort(key=lambda e: (e["ap"] is None, -(e["ap"] or 0.0), e["predictor"]))
    return {e["predictor"]: e for e in found}


def sentence(result: Mapping[str, Any]) -> str:
    """What was found, in a line: how the best predictor does against the baselines, and how sure that is."""
    horizon_s = main_horizon(result)
    entries = of_scores(result, horizon_s)
    best = next(iter(entries.values()), None)
    within = horizon_in_words(horizon_s)
    if best is None or best["ap"] is None:
        starts = 0 if best is None else best["starts"]
        return f"too few starts to say anything: {starts:,} of idle models within {within}; give a longer log"
    parts = []
    for baseline, over in best["over"].items():
        if over["ap_ratio"] is not None:
            parts.append(f"{over['ap_ratio']:.2g} times {baseline} ({_surely(over['ap_ratio_spread'])})")
    said = f"{best['predictor']} foresees starts within {within} best: average precision {_figure(best['ap'])}"
    return f"{said}, {' and '.join(parts)}" if parts else said


def tables(result: Mapping[str, Any], width: int) -> list[Any]:
    """Rich tables: all scores at the main horizon, average precision by horizon, and by segment."""
    main_s = main_horizon(result)
    entries = of_scores(result, main_s)
    baselines = [str(name) for name in result["baselines"]]
    within = horizon_in_words(main_s)
    rows = []
    for name, e in entries.items():
        over = [_ratio(e["over"].get(baseline)) for baseline in baselines]
        rows.append([name, _with_spread(e, "ap"), *over, _figure(e["brier"], 4), _figure(e["ece"], 4), _share(e["recall"])])
    heads = ["predictor", "average precision", *(f"× {baseline}" for baseline in baselines), "Brier", "calibration error", "starts found"]
    made = [_table(f"starts within {within}", heads, rows, width)]
    horizons = [float(h) for h in result["horizons_s"]]
    by_horizon = {h: of_scores(result, h) for h in horizons}
    rows = [[name, *(_figure(by_horizon[h][name]["ap"]) if name in by_horizon[h] else "–" for h in horizons)] for name in entries]
    made.append(_table("average precision by horizon", ["predictor", *map(horizon_in_words, horizons)], rows, width))
    by_segment = {segment: of_scores(result, main_s, segment) for segment in result["segments"]}
    shown = {segment: of for segment, of in by_segment.items() if any(e["ap"] is not None for e in of.values())}
    if shown:
        rows = [[name, *(_figure(of[name]["ap"]) if name in of else "–" for of in shown.values())] for name in entries]
        starts = ["starts", *(f"{max(e['starts'] for e in of.values()):,}" for of in shown.values())]
        made.append(_table(f"average precision by kind of model, within {within}", ["predictor", *shown], [*rows, starts], width))
    return made


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Any:
    """A table that is at most `width` wide: columns are left out from the last on, but for the first two."""
    import textwrap

    from rich.table import Table

    least = [max(len(word) for word in [*head.split(), *(row[i] for row in rows)]) for i, head in enumerate(heads)]
    shown = list(range(len(heads)))
    while len(shown) > 2 and 1 + sum(_FRAME + least[i] for i in shown) > width:
        shown.pop()
    whole = 1 + sum(_FRAME + max(least[i], len(heads[i])) for i in shown) <= width
    table = Table(title=title, title_justify="left")
    for i in shown:
        head = heads[i] if whole else "\n".join(textwrap.wrap(heads[i], least[i], break_long_words=False))
        table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _surely(interval: Mapping[str, Any] | None) -> str:
    if interval is None or interval["low"] is None:
        return "one origin, no spread"
    words = f"{interval['low']:.2g} to {interval['high']:.2g} over {interval['n']} origins"
    return words if interval["low"] > 1.0 or interval["high"] < 1.0 else f"{words}, may be chance"


def _with_spread(entry: Mapping[str, Any], key: str) -> str:
    interval = entry["spread"][key]
    if entry[key] is None:
        return "–"
    if interval is None or interval["low"] is None:
        return _figure(entry[key])
    return f"{_figure(entry[key])} ± {_figure((interval['high'] - interval['low']) / 2.0)}"


def _ratio(over: Mapping[str, Any] | None) -> str:
    return "–" if over is None or over["ap_ratio"] is None else f"{over['ap_ratio']:.2f}"


def _figure(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
