"""A fitted hazard as an artifact, every hour: what a controller starts from that has nothing of its own.

The leading controller fits by the time of its log, and nobody fits beside it: what it learned last is written down. Only where no
controller has a fit yet is one made here, from the hours of history, through the same learner that the controller reads its own log with.
Covers neither fitting nor the format of artifacts (`prefetcher_models`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from prefetcher.batch.scheduler import Did, Run
from prefetcher.controller import records
from prefetcher.controller.learner import Learner
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.ingest.history import read_hours
from prefetcher.ports import StateStore
from prefetcher_models.hazard import Hazard

__all__ = ["hazard_retrain", "rows_of_history"]

#: History before this is not trained from: fits weigh what is recent anyway.
_LOOK_BACK_S = 14 * 86_400.0
#: Rows of a model in a minute that are told apart: features have them as rates.
_MOST_A_MINUTE = 10


def hazard_retrain(
    run: Run, state: StateStore, make: Callable[[], Learner], history: Path, save: Callable[[Hazard], str], now_s: float
) -> Did:
    """Saves the controller's last fit, else one from history. `save` writes an artifact and names it."""
    raw = state.read(records.LEARNED)
    learner = make()
    if raw is not None:
        run.at(0.1, 1.0, "reading what the controller learned")
        learner.restore(raw)
    found = learner.predictor
    if isinstance(found, Hazard) and any(found.fit.trees):
        run.check()
        return Did(found.fit.rows, f"the controller's fit saved as {save(found)}")
    learner = make()
    rows = 0
    hours = list(rows_of_history(history, now_s - _LOOK_BACK_S))
    for number, hour in enumerate(hours):
        run.at(number, len(hours), "learning from history")
        learner.take(hour, {}, now_s, caught_up=False)
        learner.refit_now(learner.traffic.newest_s)
        rows += len(hour)
    found = learner.predictor
    if not isinstance(found, Hazard) or not any(found.fit.trees):
        return Did(rows, f"no fit: {rows} rows of history are too few")
    run.check()
    return Did(rows, f"fitted from {len(hours)} hours of history, saved as {save(found)}")


def rows_of_history(folder: Path, since_s: float) -> Iterator[list[RequestSeen]]:
    """Rows hour by hour in the order of time, spread evenly over each minute: their own seconds and users are not kept."""
    minutes: dict[int, dict[str, int]] = {}
    for _, minute, models in read_hours(folder):
        if minute * 60.0 >= since_s:
            mine = minutes.setdefault(minute, {})
            for model, rows in models.items():
                mine[model] = mine.get(model, 0) + rows
    hour: list[RequestSeen] = []
    last = None
    for minute in sorted(minutes):
        if last is not None and minute // 60 != last // 60 and hour:
            yield hour
            hour = []
        last = minute
        found = []
        for model, rows in minutes[minute].items():
            kept = min(rows, _MOST_A_MINUTE)
            for i in range(kept):
                count = rows // kept + (i < rows % kept)
                found.append(RequestSeen(60.0 * (minute + (i + 0.5) / kept), ModelName(model), count))
        hour += sorted(found, key=lambda row: row.ts)
    if hour:
        yield hour
