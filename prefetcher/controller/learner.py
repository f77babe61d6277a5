"""What the controller has learned: traffic, names, predictors; from rows in stream order, and exactly restorable.

A snapshot is the state after all rows before a position of the stream: restored and fed the rows from there, a learner goes on as if
nothing had happened. Fits run on a copy in another thread (`Refit`), so that planning never waits for one. Reads no clock and no stream.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prefetcher.controller.records import pack_arrays, unpack_arrays
from prefetcher.core.traffic import TAUS_S, Block, Traffic
from prefetcher.core.types import HORIZONS_S, RequestSeen
from prefetcher.core.value import next_use_rate
from prefetcher.errors import PredictorError
from prefetcher_models.predictor import Predictor, checked

__all__ = ["Learner", "NextUse", "Refit", "ScheduledPredictor", "Taken"]

#: The window of the index: ten minutes (W of the decision).
WINDOW = HORIZONS_S.index(600.0)
#: Time scales that the rates without learning are the mean of: 10 min, 1 h, 6 h, 1 d.
_MIX = [TAUS_S.index(tau_s) for tau_s in (600.0, 3600.0, 21600.0, 86400.0)]
_HOUR = TAUS_S.index(3600.0)
#: The hazard's share of the blend in log space; the rest is the mix of rates.
_HAZARD_SHARE = 0.7
#: Request ids remembered to drop repeats: an hour at about 28 rows a second.
_IDS_KEPT = 100_000
#: A model that comes back after this long starts anew: its companions may be due.
_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step took in: rows counted, repeats dropped, and the models that started (first row, or back after five minutes)."""

    rows: int
    repeated: int
    started: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NextUse:
    """Per model of `models`: `per_s`, the rate at which the next use comes, `rows_per_s`, and the parts that `per_s` was blended from."""

    models: tuple[str, ...]
    per_s: npt.NDArray[np.float64]
    rows_per_s: npt.NDArray[np.float64]
    parts: dict[str, npt.NDArray[np.float64]]
    fallback: str = ""

    def contributions(self, i: int) -> tuple[tuple[str, float], ...]:
        """The shares of model `i`'s parts in its rate, largest first."""
        total = sum(float(part[i]) for part in self.parts.values())
        if total <= 0.0:
            return ()
        shares = [(name, round(float(part[i]) / total, 4)) for name, part in self.parts.items()]
        return tuple(sorted((s for s in shares if s[1] > 0.0), key=lambda s: -s[1]))


class ScheduledPredictor(Predictor, Protocol):
    """A predictor that says when its next fit is due."""

    @property
    def next_fit_s(self) -> float: ...


class Learner:
    """Traffic and a predictor over named models. Not for two threads at once.

    `make` builds the predictor, or gives None to go by rates alone; a predictor that fails is counted in `fallbacks` and not asked for
    that forecast.
    """

    def __init__(self, make: Callable[[], ScheduledPredictor | None]) -> None:
        self._make = make
        self.traffic = Traffic()
        self.predictor = make()
        self.names: list[str] = []
        self._number: dict[str, int] = {}
        self._ids: OrderedDict[str, None] = OrderedDict()
        self.position = 0
        self.ticked_s = -np.inf
        self.fallbacks: dict[tuple[str, str], int] = {}
        self._since_copy: list[Block] | None = None

    def take(self, requests: Sequence[RequestSeen], position: int, tick_s: float | None = None) -> Taken:
        """Learns rows in stream order, up to `position`; at `tick_s`, if given, the features of all models are sampled as well."""
        ts: list[float] = []
        numbers: list[int] = []
        users: list[int] = []
        counts: list[int] = []
        started: list[str] = []
        repeated = 0
        newest = self.traffic.newest_s
        for request in requests:
            if request.request_id is not None and not self._is_new(request.request_id):
                repeated += 1
                continue
            number = self._number.get(request.model)
            if number is None:
                number = self._number[request.model] = len(self.names)
                self.names.append(request.model)
                started.append(request.model)
            elif number < self.traffic.n_models and request.ts - self.traffic.last_s[number] > _START_S and request.model not in started:
                started.append(request.model)
            newest = max(newest, request.ts)
            ts.append(request.ts)
            numbers.append(number)
            users.append(_user_number(request.user))
            counts.append(request.count)
        ticks = [tick_s] if tick_s is not None and tick_s >= newest else []
        if ts or ticks:
            block = self.traffic.advance(ts, numbers, users, counts, ticks=ticks)
            self._learn(block)
        self.position = position
        if tick_s is not None:
            self.ticked_s = tick_s
        return Taken(len(ts), repeated, tuple(started))

    def last_row_s(self, model: str) -> float:
        """When `model` was last used; −inf if never."""
        number = self._number.get(model)
        return -np.inf if number is None or number >= self.traffic.n_models else float(self.traffic.last_s[number])

    def _is_new(self, request_id: str) -> bool:
        if request_id in self._ids:
            return False
        self._ids[request_id] = None
        if len(self._ids) > _IDS_KEPT:
            self._ids.popitem(last=False)
        return True

    def _learn(self, block: Block) -> None:
        if self.predictor is not None:
            try:
                self.predictor.learn(self.traffic, block)
            except PredictorError as exc:
                self._count(exc.predictor or self.predictor.name, "learning failed")
            if self._since_copy is not None:
                self._since_copy.append(block)

    def _count(self, predictor: str, reason: str) -> None:
        self.fallbacks[predictor, reason] = self.fallbacks.get((predictor, reason), 0) + 1

    def next_use(self, now_s: float, models: Sequence[str]) -> NextUse:
        """When each of `models` is used next; 0 for one never used."""
        at_s = max(now_s, self.traffic.newest_s)
        known = [(i, self._number[model]) for i, model in enumerate(models) if model in self._number]
        which = np.array([number for _, number in known], np.int64)
        where = np.array([i for i, _ in known], np.int64)
        mix = np.zeros(len(models))
        rows = np.zeros(len(models))
        fallback = ""
        if len(which):
            rates = self.traffic.rates(at_s, which)
            mix[where] = rates[:, _MIX].mean(axis=1)
            rows[where] = rates[:, _HOUR]
            hazard, fallback = self._hazard(at_s, which)
            if hazard is not None:
                assert self.predictor is not None
                blend = np.exp(_HAZARD_SHARE * np.log(hazard + 1e-12) + (1.0 - _HAZARD_SHARE) * np.log(mix[where] + 1e-12))
                per_s = np.zeros(len(models))
                per_s[where] = blend
                learned = np.zeros(len(models))
                learned[where] = _HAZARD_SHARE * hazard
                parts = {self.predictor.name: learned, "recent rate": (1.0 - _HAZARD_SHARE) * mix}
                return NextUse(tuple(models), per_s, rows, parts, fallback)
        scales = {"rate of 10 min": 0, "rate of 1 h": 1, "rate of 6 h": 2, "rate of 1 d": 3}
        parts = {}
        for name, column in scales.items():
            part = np.zeros(len(models))
            if len(which):
                part[where] = rates[:, _MIX[column]] / len(_MIX)
            parts[name] = part
        return NextUse(tuple(models), mix, rows, parts, fallback)

    def _hazard(self, at_s: float, which: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float64] | None, str]:
        if self.predictor is None:
            return None, "no predictor"
        try:
            # A gateway's clock may run ahead of ours: what is forecast lies after every row that is known.
            forecast = checked(self.predictor.forecast(self.traffic, max(at_s, self.traffic.newest_s), which))
        except PredictorError as exc:
            self._count(exc.predictor or self.predictor.name, "failed")
            return None, str(exc)
        if forecast.fallback:
            self._count(forecast.predictor, forecast.fallback)
            return None, forecast.fallback
        rate = next_use_rate(forecast.p.astype(np.float32), np.array(HORIZONS_S), WINDOW)
        return rate.astype(np.float64), ""

    def start_refit(self, now_s: float) -> Refit | None:
        """A fit of a copy of the predictor, for another thread and then `finish_refit`; None while none is due."""
        if self.predictor is None or self._since_copy is not None or self.predictor.next_fit_s > now_s:
            return None
        copy = self._make()
        if copy is None:
            return None
        copy.restore({name: array.copy() for name, array in self.predictor.snapshot().items()})
        self._since_copy = []
        return Refit(copy, now_s)

    def finish_refit(self, refit: Refit) -> bool:
        """Takes the copy over after it learned what came meanwhile, unless its fit failed; whether it has new trees."""
        blocks, self._since_copy = self._since_copy or [], None
        if refit.error is not None:
            self._count(refit.predictor.name, "fit failed")
            return False
        for block in blocks:
            refit.predictor.learn(self.traffic, block)
        self.predictor = refit.predictor
        return refit.paid

    def snapshot(self) -> bytes:
        """Everything learned up to `position`."""
        arrays = {f"traffic/{name}": array for name, array in self.traffic.snapshot().items()}
        if self.predictor is not None:
            arrays |= {f"predictor/{name}": array for name, array in self.predictor.snapshot().items()}
        meta: dict[str, Any] = {
            "position": self.position,
            "names": self.names,
            "ids": list(self._ids),
            "ticked_s": self.ticked_s if np.isfinite(self.ticked_s) else None,
            "predictor": None if self.predictor is None else self.predictor.name,
        }
        return pack_arrays(arrays, meta)

    def restore(self, raw: bytes) -> None:
        """Takes over a snapshot. A predictor that can't take its part over starts anew and is counted.

        Raises:
            ValueError: it is no snapshot of a learner.
        """
        arrays, meta = unpack_arrays(raw)
        self.traffic = Traffic.restore(_under(arrays, "traffic/"))
        self.names = list(meta["names"])
        self._number = {name: i for i, name in enumerate(self.names)}
        self._ids = OrderedDict.fromkeys(meta["ids"])
        self.position = int(meta["position"])
        self.ticked_s = -np.inf if meta["ticked_s"] is None else float(meta["ticked_s"])
        self.predictor = self._make()
        if self.predictor is not None:
            try:
                if meta["predictor"] != self.predictor.name:
                    raise PredictorError(f"the snapshot holds {meta['predictor']}", predictor=self.predictor.name)
                self.predictor.restore(_under(arrays, "predictor/"))
            except PredictorError:
                self.predictor = self._make()
                assert self.predictor is not None
                self._count(self.predictor.name, "snapshot not understood")


class Refit:
    """One fit of a predictor's copy. `run` may run in any thread, once."""

    def __init__(self, predictor: ScheduledPredictor, now_s: float) -> None:
        self.predictor = predictor
        self.paid = False
        self.error: PredictorError | None = None
        self.done = threading.Event()
        self._now_s = now_s

    def run(self) -> None:
        try:
            self.paid = self.predictor.refit(self._now_s)
        except PredictorError as exc:
            self.error = exc
        finally:
            self.done.set()


def _user_number(user: str | None) -> int:
    """A stable number below 2⁶³ for a user's name, −1 for none."""
    if user is None:
        return -1
    return int.from_bytes(hashlib.blake2b(user.encode(), digest_size=8).digest(), "big") >> 1


def _under(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
