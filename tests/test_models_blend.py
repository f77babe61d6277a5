"""The watched hazard: it keeps the contract, falls back where it loses or is stale, comes back, and says what a forecast is made of."""

from __future__ import annotations

import numpy as np
import pytest

from prefetcher.core.traffic import FEATURE_NAMES, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.blend import GROUPS, LOSES, STALE, Watch, WatchedHazard, contributions_of, groups_of
from prefetcher_models.check_predictor import CHECKS
from prefetcher_models.hazard import Hazard, HazardSettings
from prefetcher_models.predictor import rate_probabilities, recent_rate

START_S = 1_700_001_000.0  # a whole half hour
DAY_S = 86400.0
SMALL = HazardSettings(trees=10, samples=4_000, fewest_samples=200, horizons=(1, 3, 6))
_10_MIN = HORIZONS_S.index(600.0)


def small_watched() -> WatchedHazard:
    return WatchedHazard(HazardSettings(trees=5, samples=2_000, fewest_samples=100, horizons=(1, 3), growth=2.0))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check) -> None:
    check(small_watched)


def log(days: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three timers (20, 40, 90 minutes) and three at random."""
    rng = np.random.default_rng(seed)
    parts = [(np.arange(rng.uniform(0, gap), days * DAY_S, gap), m) for m, gap in enumerate((1200.0, 2400.0, 5400.0))]
    parts += [(np.sort(rng.uniform(0, days * DAY_S, int(20 * days))), m) for m in (3, 4, 5)]
    ts = np.concatenate([t for t, _ in parts])
    order = np.argsort(ts, kind="stable")
    return START_S + ts[order], np.concatenate([np.full(len(t), m) for t, m in parts])[order]


class Run:
    """A predictor over a log, in blocks of `block_s`, with ticks at whole minutes."""

    def __init__(self, predictor: Hazard) -> None:
        self.predictor = predictor
        self.traffic = Traffic(6)
        self.now_s = START_S
        self.fitted_s: list[float] = []

    def over(self, ts: np.ndarray, model: np.ndarray, until_s: float, block_s: float = 1800.0) -> None:
        while self.now_s < until_s:
            end_s = min(until_s, (self.now_s // block_s + 1.0) * block_s)
            if self.now_s % 1800.0 == 0.0 and self.predictor.refit(self.now_s):
                self.fitted_s.append(self.now_s)
            part = slice(*np.searchsorted(ts, [self.now_s, end_s]))
            ticks = np.arange(np.ceil(self.now_s / 60.0), np.ceil(end_s / 60.0)) * 60.0
            block = self.traffic.advance(ts[part], model[part], ticks=ticks, from_s=self.now_s, until_s=end_s)
            self.predictor.learn(self.traffic, block)
            self.now_s = end_s


def test_it_speaks_where_it_wins_and_blocks_do_not_matter() -> None:
    ts, model = log(2.0)
    one, other = Run(WatchedHazard(SMALL)), Run(WatchedHazard(SMALL))
    one.over(ts, model, START_S + 2.0 * DAY_S)
    other.over(ts, model, START_S + 2.0 * DAY_S, block_s=300.0)
    assert isinstance(one.predictor, WatchedHazard)
    watch = one.predictor.watch
    # About one window each ten minutes since the first fit, and the hazard foresees timers.
    assert 250 < watch.windows < 288
    assert watch.mean < -2.0 * watch.error
    assert one.predictor.why_not == ""
    assert one.predictor.fallbacks[LOSES] == 0
    first, second = one.predictor.snapshot(), other.predictor.snapshot()
    assert set(first) == set(second)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first if name.startswith(("watch_", "trees_")))
    # Heard, it says what the plain one says.
    plain = Hazard(SMALL, one.predictor.fit)
    x = one.traffic.features(one.now_s)
    assert one.predictor.probabilities(x, (1, 3)).tobytes() == plain.probabilities(x, (1, 3)).tobytes()


def lost(fit_of: WatchedHazard) -> WatchedHazard:
    """The same trees with all odds turned round: whatever it says is wrong."""
    from dataclasses import replace

    fit = fit_of.fit
    return WatchedHazard(
        HazardSettings(trees=10, horizons=(1, 3, 6), first_fit_s=100 * DAY_S), replace(fit, lines=tuple((-1.0, 0.0) for _ in fit.lines))
    )


def test_one_that_loses_falls_back_is_counted_and_comes_back() -> None:
    ts, model = log(3.0)
    good = Run(WatchedHazard(SMALL))
    good.over(ts, model, START_S + 1.0 * DAY_S)
    assert isinstance(good.predictor, WatchedHazard)
    bad = Run(lost(good.predictor))
    assert isinstance(bad.predictor, WatchedHazard)
    bad.over(ts, model, START_S + 0.2 * DAY_S)
    assert bad.predictor.why_not == ""
    bad.over(ts, model, START_S + 0.5 * DAY_S)
    assert bad.predictor.why_not == LOSES
    x = bad.traffic.features(bad.now_s)
    said = bad.predictor.probabilities(x, (1, 3))
    assert said.tobytes() == rate_probabilities(recent_rate(x), (HORIZONS_S[1], HORIZONS_S[3])).tobytes()
    assert bad.predictor.fallbacks[LOSES] == len(x)
    # Restored, it is what it was, and goes on alike.
    again = Run(WatchedHazard(bad.predictor.settings))
    again.predictor.restore(bad.predictor.snapshot())
    again.traffic, again.now_s = Traffic.restore(bad.traffic.snapshot()), bad.now_s
    for run in (bad, again):
        run.over(ts, model, START_S + 0.6 * DAY_S)
    assert all(v.tobytes() == again.predictor.snapshot()[k].tobytes() for k, v in bad.predictor.snapshot().items())
    # With trees that are right it is measured on, and heard again once it wins.
    bad.predictor._take_over(good.predictor.fit)
    bad.over(ts, model, START_S + 2.5 * DAY_S)
    assert bad.predictor.why_not == ""


def test_a_fit_that_is_old_is_stale() -> None:
    ts, model = log(1.0)
    run = Run(WatchedHazard(SMALL))
    run.over(ts, model, START_S + DAY_S)
    assert isinstance(run.predictor, WatchedHazard)
    run.predictor._next_fit_s = np.inf
    run.over(ts, model, START_S + 2.9 * DAY_S)
    assert run.predictor.why_not in ("", LOSES)
    run.over(ts, model, START_S + 5.0 * DAY_S)
    assert run.predictor.why_not == STALE
    x = run.traffic.features(run.now_s)
    run.predictor.probabilities(x, (3,))
    assert run.predictor.fallbacks[STALE] == len(x)


def test_a_change_is_an_alarm_and_chance_is_none() -> None:
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(20):
        watch = Watch()
        for difference in rng.normal(-1.0, 1.0, 1000):
            watch = watch.after(float(difference))
        alarms += watch.alarms
        assert not watch.losing
    # 20,000 windows are 20 weeks.
    assert alarms <= 20
    watch = Watch()
    for difference in rng.normal(-1.0, 1.0, 300):
        watch = watch.after(float(difference))
    before = watch.alarms
    for difference in rng.normal(1.5, 1.0, 40):
        watch = watch.after(float(difference))
    assert watch.alarms > before


def test_drift_brings_the_next_fit_forward() -> None:
    ts, model = log(2.0)
    # After a day and a half everything comes at other times.
    late = ts > START_S + 1.5 * DAY_S
    model = np.where(late, (model + 3) % 6, model)
    plain, watched = Run(Hazard(SMALL)), Run(WatchedHazard(SMALL))
    for run in (plain, watched):
        run.over(ts, model, START_S + 2.0 * DAY_S)
    assert watched.predictor.fallbacks["drifts: fitted sooner"] >= 1
    sooner = sorted(set(watched.fitted_s) - set(plain.fitted_s))
    assert sooner
    assert sooner[0] > START_S + 1.5 * DAY_S
    assert sooner[0] < min(at_s for at_s in plain.fitted_s if at_s > START_S + 1.5 * DAY_S and at_s not in watched.fitted_s)


def test_a_snapshot_of_an_unwatched_hazard_is_taken_over_and_a_spoilt_one_refused() -> None:
    ts, model = log(0.5)
    run = Run(Hazard(SMALL))
    run.over(ts, model, START_S + 0.5 * DAY_S)
    watched = WatchedHazard(SMALL)
    watched.restore(run.predictor.snapshot())
    assert watched.fit == run.predictor.fit
    assert watched.watch == Watch()
    spoilt = watched.snapshot() | {"watch_counts": np.zeros(2, np.int64)}
    with pytest.raises(PredictorError, match="watch is not understood"):
        WatchedHazard(SMALL).restore(spoilt)


def test_every_feature_has_a_group_and_each_group_features() -> None:
    groups = groups_of(("seasonal_log_1h", "next_users_120s", "own_thing"))
    assert len(groups) == len(FEATURE_NAMES) + 3
    assert groups[-3:] == ["seasonal forecast", "what follows what", "own"]
    assert set(GROUPS) <= set(groups)
    assert groups[FEATURE_NAMES.index("log_age")] == "time since last use"
    assert groups[FEATURE_NAMES.index("next_use_yesterday_min")] == "time of day and week"


def test_contributions_name_what_a_timer_is_foreseen_by() -> None:
    ts, model = log(2.0)
    run = Run(WatchedHazard(SMALL))
    # Just before the 40 minutes' timer is due.
    due_s = float(ts[(model == 1) & (ts > START_S + 1.5 * DAY_S)][0])
    run.over(ts, model, due_s - 60.0)
    x = run.traffic.features(run.now_s)
    found = contributions_of(run.predictor, x[1], np.median(x, axis=0))
    assert sum(share for _, share in found) == pytest.approx(1.0, abs=0.05)
    assert found == tuple(sorted(found, key=lambda pair: -pair[1]))
    assert {name for name, _ in found} <= set(GROUPS) | {"other traffic"}
    # What is as usual has nothing that raised it.
    assert contributions_of(run.predictor, x[1], x[1]) == ()
