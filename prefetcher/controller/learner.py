"""What the controller has learned: traffic, names, feature sources, predictors; from rows in stream order, and exactly restorable.

A snapshot is the state after all records before its positions in the streams: restored and fed the rows from there, a learner goes on as if
nothing had happened. Fits run on copies in another thread (`Refit`), so that planning never waits for one. Reads no clock and no stream.
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

from prefetcher.controller.records import PredictorState, pack_arrays, unpack_arrays
from prefetcher.core.experts import HORIZONS, VARIANTS, rates_of_next_use
from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.core.types import HORIZONS_S, ModelName, RequestSeen
from prefetcher.errors import PredictorError
from prefetcher.ports import Partition, Positions, Topic
from prefetcher_models.blend import BASELINE, contributions_of
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.hazard import Hazard
from prefetcher_models.predictor import Predictor, rate_probabilities, recent_rate
from prefetcher_models.sources import Sources, joined

__all__ = ["Learner", "Refit", "ScheduledPredictor", "Taken"]

#: Request ids remembered to drop repeats: an hour at about 28 rows a second.
_IDS_KEPT = 100_000
#: A model that comes back after this long starts anew: its companions may be due.
_START_S = 300.0
#: Feature rows of ticks that one step computes at most: some 100 MB. After a silence the last ticks are what counts.
_MOST_TICK_ROWS = 400_000
#: Of snapshots. Version 1 had one position.
_VERSION = 2
#: Ticks that one step computes at most: two weeks of minutes.
_MOST_TICKS = 20_000


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step took in.

    `rows` were counted, `repeated` dropped; `started` are models with their first row, or back after five minutes. The rates of next use
    (`core.experts`): `after_row` float32[VARIANTS, N] right after each row of model number `model` int64[N] at `ts` float64[N], and
    `at_tick` float32[VARIANTS, T, n] of every model at the times `ticks` float64[T], consecutive multiples of the tick.
    """

    rows: tuple[RequestSeen, ...]
    repeated: int
    started: tuple[str, ...]
    ts: npt.NDArray[np.float64]
    model: npt.NDArray[np.int64]
    after_row: npt.NDArray[np.float32]
    ticks: npt.NDArray[np.float64]
    at_tick: npt.NDArray[np.float32]


class ScheduledPredictor(Predictor, Protocol):
    """A predictor that says when its next fit is due, and forecasts from features that were computed already."""

    @property
    def next_fit_s(self) -> float: ...

    def probabilities(self, x: npt.NDArray[np.float32], horizons: tuple[int, ...]) -> npt.NDArray[np.float64]: ...


class Learner:
    """Traffic and a predictor over named models. Not for two threads at once.

    `make` builds the predictor, or gives None to go by rates alone; a predictor that fails is counted in `fallbacks` and not asked for
    that forecast. `make_sources` builds what adds columns to its features; the predictor must be one for their names.
    """

    def __init__(
        self,
        make: Callable[[], ScheduledPredictor | None],
        tick_s: float = 60.0,
        make_sources: Callable[[], Sequence[FeatureSource]] = tuple,
    ) -> None:
        self._make = make
        self._make_sources = make_sources
        self._tick_s = tick_s
        self.traffic = Traffic()
        self.predictor = make()
        self.sources = Sources(make_sources())
        self.names: list[str] = []
        self._number: dict[str, int] = {}
        self._ids: OrderedDict[str, None] = OrderedDict()
        self.positions: dict[Partition, int] = {}
        #: Number of the last tick whose features were computed; its time is that times the tick.
        self._ticked = -1
        self.fallbacks: dict[tuple[str, str], int] = {}
        #: Models and feature rows of the last tick, and their medians once somebody asks.
        self._last_tick: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
        self._usual: npt.NDArray[np.float32] | None = None
        #: The blocks since a copy was taken, as they came and with the sources' columns.
        self._since_copy: list[tuple[Block, Block]] | None = None

    def take(self, requests: Sequence[RequestSeen], positions: Positions, now_s: float, *, caught_up: bool = True) -> Taken:
        """Learns rows in stream order, which lead to `positions`, and scores them and the ticks that passed.

        `now_s` bounds the rows' times: one from the future counts as now. Time passes up to it once the stream is `caught_up`, until then
        up to the newest row.
        """
        kept: list[RequestSeen] = []
        ts: list[float] = []
        numbers: list[int] = []
        started: dict[str, None] = {}
        for request in requests:
            if request.request_id is not None and not self._is_new(request.request_id):
                continue
            number = self.number(request.model)
            at_s = min(request.ts, now_s)
            if number < 0:
                number = self._number[request.model] = len(self.names)
                self.names.append(request.model)
                started[request.model] = None
            elif number >= self.traffic.n_models or at_s - self.traffic.last_s[number] > _START_S:
                started[request.model] = None
            kept.append(request)
            ts.append(at_s)
            numbers.append(number)
        until_s = now_s if caught_up else max([*ts, self.traffic.newest_s])
        # What is known already, or the first row ever, may be newer than the first tick that is due.
        from_s = self.traffic.newest_s if self.traffic.rows else min(ts, default=until_s)
        ticks = self._due(from_s, until_s)
        users = [_user_number(request.user) for request in kept]
        block = self.traffic.advance(ts, numbers, users, [request.count for request in kept], ticks=ticks)
        counted = np.flatnonzero(np.isfinite(block.row_features).all(axis=1))
        came = block
        if len(ts) or len(ticks):
            block = self.sources.widened(self.traffic, came)
        after_row = rates_of_next_use(self._probabilities(block.row_features[counted]))
        at_tick = np.full((VARIANTS, len(ticks), self.traffic.n_models), np.nan, np.float32)
        at_tick[:, block.tick_of, block.tick_model] = rates_of_next_use(self._probabilities(block.tick_features))
        if len(ts) or len(ticks):
            self._learn(came, block)
        if len(ticks):
            last = np.flatnonzero(block.tick_of == len(ticks) - 1)
            self._last_tick, self._usual = (block.tick_model[last], block.tick_features[last]), None
        self.positions.update(positions)
        return Taken(
            rows=tuple(kept[i] for i in counted),
            repeated=len(requests) - len(kept),
            started=tuple(started),
            ts=block.ts[counted],
            model=block.model[counted],
            after_row=after_row,
            ticks=ticks,
            at_tick=at_tick,
        )

    def _due(self, from_s: float, until_s: float) -> npt.NDArray[np.float64]:
        """The ticks in [from_s, until_s] that were not computed yet: all of them, or the last ones after a long silence."""
        if not np.isfinite(until_s):
            return np.zeros(0)
        last = int(until_s // self._tick_s)
        first = max(self._ticked + 1, int(np.ceil(from_s / self._tick_s)))
        most = min(_MOST_TICKS, max(1, _MOST_TICK_ROWS // max(1, len(self.names))))
        first = max(first, last + 1 - most)
        self._ticked = max(self._ticked, last)
        return np.arange(first, last + 1).astype(np.float64) * self._tick_s

    def _probabilities(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """float32[n, len(HORIZONS)] for feature rows x float32[n, F]."""
        if self.predictor is not None:
            try:
                return self.predictor.probabilities(x, HORIZONS).astype(np.float32)
            except PredictorError as exc:
                self._count(exc.predictor or self.predictor.name, "failed")
        return rate_probabilities(recent_rate(x), tuple(HORIZONS_S[h] for h in HORIZONS)).astype(np.float32)

    def at(self, positions: Positions) -> bool:
        """Whether nothing is new at `positions`."""
        return all(self.positions.get(partition) == offset for partition, offset in positions.items())

    def number(self, model: str) -> int:
        """The number of `model` in traffic and rates; −1 for one never used."""
        return self._number.get(ModelName(model), -1)

    def last_row_s(self, model: str) -> float:
        """When `model` was last used; −inf if never."""
        number = self.number(model)
        return -np.inf if number < 0 or number >= self.traffic.n_models else float(self.traffic.last_s[number])

    def _is_new(self, request_id: str) -> bool:
        if request_id in self._ids:
            return False
        self._ids[request_id] = None
        if len(self._ids) > _IDS_KEPT:
            self._ids.popitem(last=False)
        return True

    def _learn(self, came: Block, widened: Block) -> None:
        if self.predictor is not None:
            try:
                self.predictor.learn(self.traffic, widened)
            except PredictorError as exc:
                self._count(exc.predictor or self.predictor.name, "learning failed")
            if self._since_copy is not None:
                self._since_copy.append((came, widened))

    def fallback_counts(self) -> dict[tuple[str, str], int]:
        """How often something else stood in for a forecast, by predictor and reason."""
        own = {} if self.predictor is None else {(self.predictor.name, reason): n for reason, n in self.predictor.fallbacks.items()}
        return own | dict(self.sources.fallbacks) | self.fallbacks

    def why(self, model: str) -> tuple[tuple[str, float], ...]:
        """What the forecast for `model` was made of at the last tick, with shares; empty where it can't be said."""
        if self._last_tick is None or not isinstance(self.predictor, Hazard):
            return ()
        if getattr(self.predictor, "why_not", ""):
            return ((BASELINE, 1.0),)
        models, x = self._last_tick
        at = np.flatnonzero(models == self.number(model))
        if not len(at) or x.shape[1] != len(FEATURE_NAMES) + len(self.predictor.names):
            return ()
        if self._usual is None:
            self._usual = np.median(x, axis=0)
        return contributions_of(self.predictor, x[at[0]], self._usual)

    def predictor_states(self) -> tuple[PredictorState, ...]:
        """How each predictor stands."""
        counts = self.fallback_counts()
        names = dict.fromkeys([*([] if self.predictor is None else [self.predictor.name]), *(name for name, _ in counts)])
        states = []
        for name in names:
            fallbacks = {reason: count for (of, reason), count in counts.items() if of == name and count}
            predictor = self.predictor
            if not isinstance(predictor, Hazard) or predictor.name != name:
                states.append(PredictorState(name, fallbacks=fallbacks))
                continue
            fit, fitted = predictor.fit, any(predictor.fit.trees)
            why_not = getattr(predictor, "why_not", "" if fitted else "no fit yet")
            scores = {horizon: dict(of) for horizon, of in fit.scores.items()}
            from_s, until_s = (fit.from_s, fit.until_s) if fitted else (None, None)
            states.append(PredictorState(name, why_not, predictor.fits, from_s, until_s, fit.rows, scores, fallbacks))
        return tuple(states)

    def _count(self, predictor: str, reason: str) -> None:
        self.fallbacks[predictor, reason] = self.fallbacks.get((predictor, reason), 0) + 1

    def _is_due(self, now_s: float) -> bool:
        """Whether a fit may begin: of the predictor, or of a source that is asked whether it fits."""
        if self.predictor is None or self._since_copy is not None:
            return False
        return min(self.predictor.next_fit_s, self.sources.next_refit_s) <= now_s

    def refit_now(self, now_s: float) -> bool:
        """Fits at once if a fit is due, while nobody waits for a plan: history is being read. Whether there are new trees."""
        if self.predictor is None or not self._is_due(now_s):
            return False
        self.sources.refit(now_s)
        try:
            return self.predictor.refit(now_s)
        except PredictorError as exc:
            self._count(exc.predictor or self.predictor.name, "fit failed")
            return False

    def start_refit(self, now_s: float) -> Refit | None:
        """A fit of copies of sources and predictor, for another thread and then `finish_refit`; None while none is due."""
        if self.predictor is None or not self._is_due(now_s):
            return None
        copy = self._make()
        if copy is None:
            return None
        copy.restore({name: array.copy() for name, array in self.predictor.snapshot().items()})
        sources = Sources(self._make_sources())
        sources.restore({name: array.copy() for name, array in self.sources.snapshot().items()})
        self._since_copy = []
        return Refit(copy, now_s, sources)

    def finish_refit(self, refit: Refit) -> bool:
        """Takes the copies over after they learned what came meanwhile, unless the fit failed; whether there are new trees."""
        blocks, self._since_copy = self._since_copy or [], None
        if refit.error is not None:
            self._count(refit.predictor.name, "fit failed")
            return False
        for _, widened in blocks:
            refit.predictor.learn(self.traffic, widened)
        if blocks:
            refit.sources.widened(self.traffic, joined([came for came, _ in blocks]))
        self.predictor, self.sources = refit.predictor, refit.sources
        return refit.paid

    def snapshot(self) -> bytes:
        """Everything learned up to `positions`."""
        arrays = {f"traffic/{name}": array for name, array in self.traffic.snapshot().items()}
        if self.predictor is not None:
            arrays |= {f"predictor/{name}": array for name, array in self.predictor.snapshot().items()}
        arrays |= {f"sources/{name}": array for name, array in self.sources.snapshot().items()}
        meta: dict[str, Any] = {
            "v": _VERSION,
            "positions": [[p.topic.value, p.number, offset] for p, offset in self.positions.items()],
            "names": self.names,
            "ids": list(self._ids),
            "ticked": self._ticked,
            "tick_s": self._tick_s,
            "predictor": None if self.predictor is None else self.predictor.name,
        }
        return pack_arrays(arrays, meta)

    def restore(self, raw: bytes) -> None:
        """Takes over a snapshot. A predictor, or sources, that can't take their part over start anew and are counted.

        Raises:
            ValueError: it is no snapshot of a learner.
        """
        arrays, meta = unpack_arrays(raw)
        self.traffic = Traffic.restore(_under(arrays, "traffic/"))
        self.names = list(meta["names"])
        self._number = {name: i for i, name in enumerate(self.names)}
        self._ids = OrderedDict.fromkeys(meta["ids"])
        if meta.get("v", 1) == 1:
            # Before there were topics: a position in the one request log.
            self.positions = {Partition(Topic.REQUESTS, 0): int(meta["position"])}
        else:
            self.positions = {Partition(Topic(topic), number): offset for topic, number, offset in meta["positions"]}
        self._ticked = int(meta["ticked"]) if meta["tick_s"] == self._tick_s else -1
        self.predictor, self.sources = self._make(), Sources(self._make_sources())
        try:
            self.sources.restore(_under(arrays, "sources/"))
        except PredictorError:
            self.sources = Sources(self._make_sources())
            self._count("feature-sources", "snapshot not understood")
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
    """One fit of copies: of the sources, then of the predictor. `run` may run in any thread, once."""

    def __init__(self, predictor: ScheduledPredictor, now_s: float, sources: Sources) -> None:
        self.predictor = predictor
        self.sources = sources
        self.paid = False
        self.error: PredictorError | None = None
        self.done = threading.Event()
        self._now_s = now_s

    def run(self) -> None:
        try:
            self.sources.refit(self._now_s)
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
