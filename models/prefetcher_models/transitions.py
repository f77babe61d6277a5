"""The decayed transition table as a source of features: which models follow which, by arrivals and by users.

Cheap, online, and in force from the first row on: it is what a learned sequence model has to beat (`coactivation`). Counting and looking up
is in `follow_state`. Six columns: P(some active user uses the model within 120 s, within 600 s), by how many users that is likely (P of
0.02 within 600 s), P(it starts within 120 s, within 600 s | models that started in the last ten minutes) beyond what its own rate of
starts would say, and the largest such P (120 s) of one of them. Where a log has no users the first three are 0, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prefetcher.core.traffic import Block, Traffic
from prefetcher.errors import PredictorError
from prefetcher_models.feature_source import Floats32
from prefetcher_models.follow_scorer import LOOKS, VISITS, Scorer, table_scorer
from prefetcher_models.follow_state import COLUMNS, MODEL_FIELDS, Follow, follow_block, new_follow

__all__ = ["Seen", "Transitions"]

_VERSION = 1


class Seen:
    """Samples of active users at ticks, of one block. I instants and S samples of them.

    `at_s` float64[I], `user` int64[I], `visits` int32[I, VISITS] and `ages_s` float32[I, VISITS] (−1 and 1e6: none), newest first;
    `pairs` int64[S, 2]: instant and model; `looks` float32[S, LOOKS].
    """

    __slots__ = ("ages_s", "at_s", "looks", "pairs", "user", "visits")

    def __init__(self, instants: int, samples: int) -> None:
        self.at_s = np.empty(instants)
        self.user = np.empty(instants, np.int64)
        self.visits = np.empty((instants, VISITS), np.int32)
        self.ages_s = np.empty((instants, VISITS), np.float32)
        self.pairs = np.empty((samples, 2), np.int64)
        self.looks = np.empty((samples, len(LOOKS)), np.float32)


class Transitions:
    """A `FeatureSource` that only counts. Not for two threads at once."""

    def __init__(self, n_models: int = 0) -> None:
        self._state = new_follow(n_models)
        self._scorer = table_scorer()

    @property
    def name(self) -> str:
        return "transitions"

    @property
    def names(self) -> tuple[str, ...]:
        return COLUMNS

    @property
    def n_models(self) -> int:
        return len(self._state.last_s)

    @property
    def user_rows(self) -> int:
        """Rows taken in that named a user."""
        return int(self._state.counters[1])

    def columns(self, traffic: Traffic, block: Block) -> tuple[Floats32, Floats32]:
        """See `FeatureSource.columns`."""
        return self.take(traffic, block, self._scorer, Seen(0, 0))[:2]

    def take(self, traffic: Traffic, block: Block, scorer: Scorer, seen: Seen) -> tuple[Floats32, Floats32, int, int]:
        """The columns by `scorer`; samples go into `seen` as far as it has room: how many instants and samples did."""
        self._grow(max(traffic.n_models, int(block.model.max(initial=-1)) + 1))
        rows = np.empty((len(block.ts), len(COLUMNS)), np.float32)
        ticks = np.empty((len(block.tick_of), len(COLUMNS)), np.float32)
        instants, samples = follow_block(
            self._state,
            scorer,
            block.ts,
            block.model,
            block.user,
            block.ticks,
            block.tick_of,
            block.tick_model,
            rows,
            ticks,
            seen.at_s,
            seen.user,
            seen.visits,
            seen.ages_s,
            seen.pairs,
            seen.looks,
        )
        return rows, ticks, instants, samples

    def refit(self, now_s: float) -> bool:
        """Nothing is fitted."""
        return False

    def snapshot(self) -> dict[str, np.ndarray]:
        taken = {name: np.array(getattr(self._state, name)) for name in Follow._fields}
        return {"version": np.array(_VERSION), **taken}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        expected = {"version", *Follow._fields}
        if set(snapshot) != expected or int(snapshot["version"]) != _VERSION:
            raise PredictorError(
                f"a snapshot of transitions of another version, or parts that differ: {sorted(set(snapshot) ^ expected)}; count anew",
                predictor=self.name,
            )
        fresh = new_follow(len(snapshot["last_s"]))
        own: dict[str, Any] = {}
        for name in Follow._fields:
            have = getattr(fresh, name)
            given = np.array(snapshot[name], dtype=have.dtype)
            if given.shape != have.shape:
                raise PredictorError(
                    f"a snapshot of transitions with {name} of shape {given.shape}, expected {have.shape}; count anew", predictor=self.name
                )
            own[name] = given
        self._state = Follow(**own)

    def _grow(self, n: int) -> None:
        have = len(self._state.last_s)
        if n <= have:
            return
        more: dict[str, Any] = {}
        for name, (dtype, shape, fill) in MODEL_FIELDS.items():
            more[name] = np.concatenate([getattr(self._state, name), np.full((n - have, *shape), fill, dtype)])
        self._state = self._state._replace(**more)
