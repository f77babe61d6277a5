"""Columns of other sources beside the traffic features: learned, scored, part of a fit, restored; a source that fails costs its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from prefetcher.controller.learner import Learner
from prefetcher.core.experts import HORIZONS
from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.errors import PredictorError
from prefetcher_models.artifacts import hazard_of, hazard_parts
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.hazard import Fit, Hazard, HazardSettings
from prefetcher_models.sources import ABSENT, Sources, joined
from prefetcher_models.stream import HazardStream

START_S = 1_700_000_123.4
DAY_S = 86400.0
SMALL = HazardSettings(trees=20, samples=8_000)


def planned_uses(days: float) -> np.ndarray:
    """When model 0 is used: at random, every 36 minutes on average, as its users' `Plans` say."""
    times = START_S + np.cumsum(np.random.default_rng(5).exponential(2160.0, 200))
    return times[times < START_S + days * DAY_S]


def log(days: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    times = [planned_uses(days), *(START_S + np.sort(rng.uniform(0.0, days * DAY_S, int(60 * days))) for _ in range(3))]
    ts = np.concatenate(times)
    model = np.repeat(np.arange(len(times)), [len(t) for t in times])
    order = np.argsort(ts, kind="stable")
    return ts[order], model[order].astype(np.int64)


class Plans:
    """Knows when model 0 is used next, and how many rows came; a fit counts itself."""

    names = ("plan_wait_s", "plan_rows")

    def __init__(self) -> None:
        self.uses = planned_uses(3.0)
        self.rows = 0
        self.fits = 0
        self.asked_s: list[float] = []

    def columns(self, traffic: Traffic, block: Block) -> tuple[np.ndarray, np.ndarray]:
        assert block.row_features.shape[1] == len(FEATURE_NAMES)
        at = block.ticks[block.tick_of]
        came = block.ts[np.isfinite(block.row_features[:, 0])]
        of_rows = np.stack([self._wait(block.ts, block.model), self.rows + np.searchsorted(came, block.ts, side="right")], axis=1)
        of_ticks = np.stack([self._wait(at, block.tick_model), self.rows + np.searchsorted(came, at)], axis=1)
        self.rows += len(came)
        assert self.rows == traffic.rows
        return of_rows.astype(np.float32), of_ticks.astype(np.float32)

    def _wait(self, t: np.ndarray, model: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self.uses, t, side="right")
        wait = np.append(self.uses, np.inf)[place] - t
        return np.where(model == 0, np.log1p(wait), np.nan)

    def refit(self, now_s: float) -> bool:
        self.asked_s.append(now_s)
        self.fits += 1
        return True

    def snapshot(self) -> dict[str, np.ndarray]:
        return {"plan": np.array([self.rows, self.fits])}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        if "plan" not in snapshot:
            raise PredictorError("no plan")
        self.rows, self.fits = (int(v) for v in snapshot["plan"])


class Broken(Plans):
    names = ("broken",)

    def columns(self, traffic: Traffic, block: Block) -> tuple[np.ndarray, np.ndarray]:
        raise PredictorError("it is broken")


class Narrow(Broken):
    def columns(self, traffic: Traffic, block: Block) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((len(block.ts), 2), np.float32), np.zeros((len(block.tick_of), 1), np.float32)


def scored(days: float, bounds: list[float], sources: list[FeatureSource]) -> tuple[HazardStream, np.ndarray, np.ndarray, np.ndarray]:
    ts, model = log(days)
    stream = HazardStream(4, float(ts[0]), tick_s=120.0, horizons=(1, 3), settings=SMALL, sources=sources)
    blocks, i = [], 0
    for bound in [*bounds, ts[-1] + 60.0]:
        j = int(np.searchsorted(ts, bound))
        blocks.append(stream.advance(ts[i:j], model[i:j], None, None, bound))
        i = j
    return stream, *(np.concatenate([getattr(b, name) for b in blocks]) for name in ("p_rows", "ticks", "p_ticks"))


@pytest.fixture(scope="module")
def with_plans():
    return scored(2.0, [], [Plans()])


def test_what_only_a_source_knows_is_learned(with_plans) -> None:
    _, _, ticks, p_ticks = with_plans
    _, _, _, plain = scored(2.0, [], [])
    uses = planned_uses(2.0)
    late = ticks > START_S + DAY_S
    due = np.append(uses, np.inf)[np.searchsorted(uses, ticks, side="right")] - ticks <= 600.0

    def loss(p: np.ndarray) -> float:
        p = np.clip(p[late, 0, 1].astype(float), 1e-4, 1 - 1e-4)
        return float(-np.where(due[late], np.log(p), np.log1p(-p)).mean())

    assert loss(p_ticks) < 0.3 * loss(plain)


def test_the_bounds_of_blocks_do_not_matter(with_plans) -> None:
    stream, rows, _, p_ticks = with_plans
    ts, _ = log(2.0)
    bounds = np.sort(np.random.default_rng(1).uniform(ts[0], ts[-1], 25)).tolist()
    plans = Plans()
    other, rows_2, _, p_ticks_2 = scored(2.0, bounds, [plans])
    assert rows.tobytes() == rows_2.tobytes()
    assert p_ticks.tobytes() == p_ticks_2.tobytes()
    assert stream.hazard.fit == other.hazard.fit
    assert np.diff(plans.asked_s).tolist() == [1800.0, *[3600.0] * (len(plans.asked_s) - 2)] or (np.diff(plans.asked_s) == 3600.0).all()


def test_where_nothing_is_known_stands_a_number() -> None:
    traffic, sources = Traffic(2), Sources([Plans()])
    # the third row comes too late to count
    block = traffic.advance([START_S, START_S + 9000.0, START_S], [0, 1, 1], ticks=[START_S + 9500.0])
    wide = sources.widened(traffic, block)
    k = len(FEATURE_NAMES)
    assert sources.names == ("plan_wait_s", "plan_rows")
    assert wide.row_features.shape == (3, k + 2)
    assert wide.tick_features.shape == (2, k + 2)
    assert wide.row_features[:2, :k].tobytes() == block.row_features[:2].tobytes()
    assert np.isfinite(wide.row_features[:2]).all()
    assert np.isnan(wide.row_features[2]).all()
    assert wide.row_features[1, k] == ABSENT
    assert wide.tick_features[1, k] == ABSENT
    assert wide.tick_features[0, k] > 0.0


@pytest.mark.parametrize("broken", [Broken, Narrow])
def test_a_source_that_fails_says_nothing_and_is_counted(broken) -> None:
    traffic, sources = Traffic(1), Sources([Plans(), broken()])
    wide = sources.widened(traffic, traffic.advance([START_S], [0], ticks=[START_S + 60.0]))
    assert (wide.row_features[:, -1] == ABSENT).all()
    assert (wide.tick_features[:, -1] == ABSENT).all()
    assert wide.tick_features[0, -2] == 1.0
    assert sources.fallbacks == {("broken", "failed"): 1}


def test_names_must_be_words_of_their_own() -> None:
    for name in ("log_age", "two words", ""):
        plans = Plans()
        plans.names = (name,)
        with pytest.raises(PredictorError, match="expected one word"):
            Sources([plans])
    with pytest.raises(PredictorError, match="expected one word"):
        Sources([Plans(), Plans()])


def test_a_fit_with_other_columns_is_refused(with_plans) -> None:
    hazard = with_plans[0].hazard
    assert hazard.fit.names == Plans.names
    with pytest.raises(PredictorError, match=r"plan_wait_s.*expected \[\]"):
        Hazard(SMALL, hazard.fit)
    with pytest.raises(PredictorError, match="plan_wait_s"):
        Hazard(SMALL).restore(hazard.snapshot())
    with pytest.raises(PredictorError, match="feature rows of"):
        hazard.probabilities(np.zeros((1, len(FEATURE_NAMES)), np.float32), (1,))
    parts = hazard_parts(hazard)
    with pytest.raises(PredictorError, match="fitted on other features"):
        hazard_of(parts)
    again = hazard_of(parts, names=Plans.names)
    x = np.full((3, len(FEATURE_NAMES) + 2), 0.5, np.float32)
    assert again.probabilities(x, (1, 3)).tobytes() == hazard.probabilities(x, (1, 3)).tobytes()
    plain = Hazard(SMALL)
    assert isinstance(plain.fit, Fit)
    assert "names" not in plain.snapshot()


def test_a_snapshot_of_sources_is_restored_and_another_refused() -> None:
    traffic, sources = Traffic(1), Sources([Plans()])
    sources.widened(traffic, traffic.advance([START_S], [0]))
    sources.refit(START_S)
    kept = sources.snapshot()
    plans = Plans()
    again = Sources([plans])
    again.restore(kept)
    assert (plans.rows, plans.fits) == (1, 1)
    assert again.next_refit_s == sources.next_refit_s > START_S
    assert not again.refit(START_S + 1.0)
    assert again.refit(again.next_refit_s)
    for other in (Sources([Broken()]), Sources([Plans(), Broken()]), Sources()):
        with pytest.raises(PredictorError, match="a snapshot of feature sources"):
            other.restore(kept)
    with pytest.raises(PredictorError, match="a snapshot of feature sources"):
        again.restore({})
    assert Sources().snapshot() == {}
    Sources().restore({})


def test_blocks_are_joined_as_if_they_had_been_one() -> None:
    ts, model = log(0.2)
    ticks = np.arange(ts[0] + 100.0, ts[-1], 300.0)
    traffic, parts = Traffic(4), []
    whole = Traffic(4).advance(ts, model, ticks=ticks)
    for i, (at, until) in enumerate(zip(np.arange(0, len(ts), 7), [*np.arange(7, len(ts), 7), len(ts)], strict=True)):
        mine = (ticks >= (ts[at] if i else -np.inf)) & (ticks < (ts[until] if until < len(ts) else np.inf))
        parts.append(traffic.advance(ts[at:until], model[at:until], ticks=ticks[mine]))
    one = joined(parts)
    for name in ("ts", "model", "row_features", "ticks", "tick_of", "tick_model", "tick_features", "from_s", "until_s"):
        assert np.asarray(getattr(one, name)).tobytes() == np.asarray(getattr(whole, name)).tobytes(), name


def learner() -> Learner:
    settings = replace(SMALL, trees=5, fewest_samples=50, horizons=HORIZONS, first_fit_s=1800.0)
    return Learner(lambda: Hazard(settings, names=Plans.names), 60.0, lambda: [Plans()])


def requests(days: float) -> list[RequestSeen]:
    ts, model = log(days)
    return [RequestSeen(float(t), ModelName(f"m{m}")) for t, m in zip(ts, model, strict=True)]


def test_a_live_learner_restores_its_sources_and_refits_them_on_a_copy() -> None:
    rows = requests(0.3)
    half, end_s = len(rows) // 2, rows[-1].ts + 1.0
    one = learner()
    one.take(rows[:half], {}, rows[half - 1].ts)
    two = learner()
    two.restore(one.snapshot())
    for each in (one, two):
        refit = each.start_refit(rows[half - 1].ts + 10.0)
        assert refit is not None
        assert each.start_refit(end_s) is None
        each.take(rows[half:-20], {}, rows[-21].ts)
        each.take(rows[-20:-10], {}, rows[-11].ts)
        refit.run()
        assert each.finish_refit(refit)
        each.take(rows[-10:], {}, end_s)
        assert each.predictor.fit.names == Plans.names
    assert one.snapshot() == two.snapshot()
    x, y = (each.take([], {}, end_s + 600.0).at_tick for each in (one, two))
    assert x.tobytes() == y.tobytes()
    assert not one.fallbacks


def test_a_live_learner_starts_other_sources_anew_and_says_so() -> None:
    rows = requests(0.1)
    one = learner()
    one.take(rows, {}, rows[-1].ts)
    other = Learner(lambda: Hazard(SMALL), 60.0)
    other.restore(one.snapshot())
    assert other.fallbacks == {("feature-sources", "snapshot not understood"): 1, ("hazard", "snapshot not understood"): 1}
    other.take([], {}, rows[-1].ts + 120.0)
