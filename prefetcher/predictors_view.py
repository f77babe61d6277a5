"""`prefetcher predictors`: which predictors there are, which speak, what trained them, and how they did. Shows, and decides nothing.

What was fitted is read from the artifacts, what speaks just now from a running endpoint; where one of them is away, it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefetcher.api.client import get
from prefetcher.clock import SystemClock
from prefetcher.config import Settings, artifacts_place
from prefetcher.errors import PrefetcherError
from prefetcher.words import span
from prefetcher_connectors.artifact_store import ArtifactStore, Version
from prefetcher_models.artifacts import HAZARD
from prefetcher_models.registry import PREDICTORS, Entry, missing_packages

__all__ = ["predictors_of", "table_of"]

_HORIZON = "600"
#: Which figure is told where there are several, with its name for people.
_FIGURES = (("ap", "average precision"), ("brier", "Brier"), ("log_loss", "log loss"))


def predictors_of(settings: Settings, url: str, now_s: float | None = None) -> dict[str, Any]:
    """All predictors as JSON: those of the registry, and artifacts of other names.

    `problems` says what could not be asked, a line each.
    """
    at_s = SystemClock().now_s() if now_s is None else now_s
    problems: list[str] = []
    live, artifacts = _live(url, problems), _artifacts(settings, problems)
    entries = {one.name: one for one in PREDICTORS}
    told = []
    for name in dict.fromkeys([*entries, *artifacts, *live]):
        one, speaks, versions = entries.get(name), live.get(name), artifacts.get(name, [])
        current = next((version for version in versions if version.in_force), None)
        missing = missing_packages(one) if one else ()
        told.append(
            {
                "name": name,
                "kind": one.kind if one else "artifact" if versions else "learned",
                "what": one.what if one else "",
                "in_force": _in_force(one, missing, speaks, current),
                "version": None if current is None else current.version,
                "age_s": None if current is None or current.problem else max(0.0, at_s - current.made_s),
                "trained": _trained(speaks, current),
                "scores": _scores(speaks, current),
                "fallbacks": {} if speaks is None else dict(speaks["fallbacks"]),
                "versions": [_version(version) for version in versions],
                "needs": list(missing),
            }
        )
    return {"place": artifacts_place(settings), "now_s": at_s, "predictors": told, "problems": problems}


def table_of(found: Mapping[str, Any]) -> Any:
    """A rich table of `predictors_of`, without columns that nothing is in."""
    from rich.table import Table

    heads = ("predictor", "kind", "in force", "version", "age", "trained on", "score", "fallbacks")
    rows = []
    for one in found["predictors"]:
        age = "" if one["age_s"] is None else span(one["age_s"])
        fallbacks = ", ".join(f"{reason}: {count:,}" for reason, count in one["fallbacks"].items())
        trained, score = _data(one["trained"]), _score(one["scores"])
        rows.append((one["name"], one["kind"], one["in_force"], one["version"] or "", age, trained, score, fallbacks))
    table = Table()
    shown = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    for i in shown:
        # Lines break between words, not within them, as far as the terminal is wide enough.
        longest = max(len(word) for cell in (heads[i], *(row[i] for row in rows)) for word in cell.split(" "))
        table.add_column(heads[i], overflow="fold", no_wrap=i == 0, min_width=min(longest, 16))
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _live(url: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    """What each predictor of the leading controller says of itself, by name."""
    try:
        status = get(url, "/v1/status")
    except PrefetcherError as exc:
        problems.append(f"what speaks just now is not known: {exc}")
        return {}
    return {str(one["name"]): one for one in status.get("decides", {}).get("predictors", ())}


def _artifacts(settings: Settings, problems: list[str]) -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    try:
        store = ArtifactStore(artifacts_place(settings))
        for name in store.names():
            found[name] = store.versions(name)
    except PrefetcherError as exc:
        problems.append(f"artifacts can't be read: {exc}")
    for name, versions in found.items():
        problems += [f"{name} {version.version} is refused: {version.problem}" for version in versions if version.problem]
    return found


def _in_force(of: Entry | None, missing: Sequence[str], live: Mapping[str, Any] | None, current: Version | None) -> str:
    if missing:
        return f"no: needs {', '.join(missing)}"
    if live is not None:
        return "yes" if not live["why_not"] else f"no: {live['why_not']}"
    if current is not None:
        return "no: can't be read" if current.problem else "as an artifact"
    if of is None or of.kind == "learned":
        return "no: never fitted" if of is None or of.name == HAZARD else "in backtests only"
    return "as a measure"


def _trained(live: Mapping[str, Any] | None, current: Version | None) -> dict[str, Any] | None:
    if live is not None and live.get("until_s") is not None:
        return {key: live[key] for key in ("from_s", "until_s", "rows")}
    if current is not None and current.about is not None:
        data: dict[str, Any] | None = current.about.get("data")
        return data
    return None


def _scores(live: Mapping[str, Any] | None, current: Version | None) -> dict[str, Any]:
    """Scores by horizon, and those of the baseline where it was measured."""
    about = {} if current is None or current.about is None else current.about
    own = (live or {}).get("scores") or about.get("scores") or {}
    return {"scores": own, "baseline": about.get("baseline", ""), "baseline_scores": about.get("baseline_scores", {})}


def _version(version: Version) -> dict[str, Any]:
    told = {"version": version.version, "in_force": version.in_force, "problem": version.problem}
    if version.problem:
        return told
    return told | {"made_s": version.made_s, "program": version.program, "bytes": version.bytes, "about": version.about}


def _data(trained: Mapping[str, Any] | None) -> str:
    if not trained or trained.get("until_s") is None:
        return ""
    from datetime import UTC, datetime

    begin_s, end_s = trained.get("from_s"), trained["until_s"]
    begin, end = (None if s is None else datetime.fromtimestamp(s, UTC) for s in (begin_s, end_s))
    days = f"{begin:%Y-%m-%d} to {end:%Y-%m-%d}" if begin else f"until {end:%Y-%m-%d}"
    return f"{days}, {trained.get('rows', 0):,} rows"


def _score(scores: Mapping[str, Any]) -> str:
    """One figure within ten minutes, or at the first horizon that has one, beside the baseline's."""
    own, theirs = scores["scores"], scores["baseline_scores"]
    horizon = _HORIZON if _HORIZON in own else next(iter(own), "")
    for key, name in _FIGURES:
        value = own.get(horizon, {}).get(key)
        if value is None:
            continue
        beside = theirs.get(horizon, {}).get(key)
        against = f", {scores['baseline']} {beside:.4f}" if beside is not None else ""
        return f"{name} {value:.4f} within {float(horizon) / 60:g} min{against}"
    return ""
