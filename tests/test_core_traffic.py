"""Traffic features: batch equals online, rebuilt equals kept, and the numbers are what their names say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.traffic import FOLLOWERS, MODELS_PER_USER, USER_BUCKETS, USER_WAYS, Traffic
from prefetcher.core.traffic_state import FEATURE_NAMES, HISTORY_DAYS, LATE_S, TAUS_S

START_S = 1_700_000_000.0
DAY_S = 86400.0


def column(name: str) -> int:
    return FEATURE_NAMES.index(name)


def random_log(seed: int, rows: int, days: float, models: int = 12, users: int = 30):
    rng = np.random.default_rng(seed)
    bursts = rng.uniform(0.0, days * DAY_S, max(1, rows // 5))
    ts = START_S + np.sort(rng.choice(bursts, rows) + rng.exponential(200.0, rows))
    model = (rng.zipf(1.3, rows) % models).astype(np.int64)
    user = rng.integers(-1, users, rows)
    count = rng.integers(1, 50, rows)
    return ts, model, user, count


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), days=st.sampled_from([0.05, 2.0, 40.0]), cuts=st.integers(0, 4))
def test_a_batch_equals_row_by_row_with_rebuilds_between(seed: int, days: float, cuts: int) -> None:
    ts, model, user, count = random_log(seed, 250, days)
    rng = np.random.default_rng(seed + 1)
    ticks = np.sort(rng.uniform(ts[0] - 100.0, ts[-1] + 2 * DAY_S, 60))
    batch = Traffic().advance(ts, model, user, count, ticks=ticks)

    online = Traffic()
    rebuild = set(rng.integers(0, len(ts), cuts).tolist())
    row_features, tick_features, k = [], [], 0

    def tick() -> None:
        features = online.features(ticks[k])
        tick_features.append(features[np.isfinite(features[:, 0])])

    for i in range(len(ts)):
        while k < len(ticks) and ticks[k] <= ts[i]:
            tick()
            k += 1
        row_features.append(online.advance(ts[i], model[i], user[i], count[i]).row_features[0])
        if i in rebuild:
            online = Traffic.restore(online.snapshot())
    while k < len(ticks):
        tick()
        k += 1
    assert same_bits(batch.row_features, np.stack(row_features))
    assert same_bits(batch.tick_features, np.concatenate(tick_features))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), days=st.sampled_from([0.2, 45.0]), size=st.integers(1, 120))
def test_blocks_of_any_size_give_the_same_state(seed: int, days: float, size: int) -> None:
    ts, model, user, count = random_log(seed, 400, days)
    whole, parts = Traffic(), Traffic(12)
    whole.add(ts, model, user, count)
    for i in range(0, len(ts), size):
        at = slice(i, i + size)
        parts.add(ts[at], model[at], user[at], count[at])
    n = whole.n_models
    now_s = ts[-1] + 500.0
    assert same_bits(whole.features(now_s), parts.features(now_s, np.arange(n)))
    one, other = whole.snapshot(), parts.snapshot()
    assert same_bits(one["minutes"], other["minutes"])
    assert same_bits(one["minute_rows"], other["minute_rows"])


def test_a_snapshot_holds_only_what_is_stored_and_stands_alone() -> None:
    ts, model, user, count = random_log(3, 500, 30.0)
    traffic = Traffic()
    traffic.add(ts[:400], model[:400], user[:400], count[:400])
    taken = traffic.snapshot()
    assert "decayed" not in taken
    assert "cursor" not in taken
    kept = {name: value.copy() for name, value in taken.items()}
    again = Traffic.restore(taken)
    for side in (traffic, again):
        side.add(ts[400:], model[400:], user[400:], count[400:])
    assert all(same_bits(kept[name], taken[name]) for name in kept)
    end_s = ts[-1] + 20 * DAY_S
    for now_s in (ts[-1], ts[-1] + 5000.0, end_s):
        assert same_bits(traffic.features(now_s), again.features(now_s))
        assert same_bits(traffic.rates(now_s), again.rates(now_s))


def test_a_snapshot_of_another_shape_is_refused() -> None:
    traffic = Traffic(2)
    traffic.add([START_S], [1])
    taken = traffic.snapshot()
    with pytest.raises(ValueError, match="lacks or has too many"):
        Traffic.restore({name: value for name, value in taken.items() if name != "total"})
    with pytest.raises(ValueError, match="of shape"):
        Traffic.restore({**taken, "gaps_s": taken["gaps_s"][:, :2]})
    with pytest.raises(ValueError, match="minute counts"):
        Traffic.restore({**taken, "minutes": taken["minutes"][:-1]})


def test_rates_and_counts_equal_a_direct_sum_over_the_kept_minutes() -> None:
    ts, model, _, _ = random_log(5, 3000, 22.0)
    traffic = Traffic()
    traffic.add(ts, model)
    now_s = ts[-1] + 3 * DAY_S
    today = now_s // DAY_S * DAY_S
    kept = ts >= today - HISTORY_DAYS * DAY_S
    assert kept.sum() < len(ts)
    rates = traffic.rates(now_s)
    for m in range(traffic.n_models):
        ends = ts[kept & (model == m)] // 60.0 * 60.0 + 60.0
        direct = [np.exp(-(now_s - ends) / tau).sum() / tau for tau in TAUS_S]
        np.testing.assert_allclose(rates[m], direct, rtol=1e-9)
    for from_s, until_s in ((now_s - 5 * DAY_S, now_s - 4 * DAY_S), (now_s - 13 * DAY_S, now_s), (now_s, now_s - 60)):
        minutes = ts // 60.0
        inside = (minutes >= from_s // 60.0) & (minutes < until_s // 60.0)
        assert traffic.counts(from_s, until_s).tolist() == np.bincount(model[inside], minlength=12).tolist()


def test_windows_of_past_counts_are_those_of_the_same_time_before() -> None:
    ts, model, _, _ = random_log(8, 4000, 16.0, models=5)
    traffic = Traffic()
    now_s = ts[0] + 15.5 * DAY_S
    past = ts < now_s
    traffic.add(ts[past], model[past])
    features = traffic.features(now_s)
    minute = np.floor(ts[past] / 60.0)
    now = np.floor(now_s / 60.0)

    def rows(m: int, back: int, span: int) -> int:
        return int(((model[past] == m) & (minute >= now - back) & (minute < now - back + span)).sum())

    for m in range(5):
        got = dict(zip(FEATURE_NAMES, features[m].tolist(), strict=True))
        assert got["yesterday_10min"] == rows(m, 1440, 10)
        assert got["yesterday_1h"] == rows(m, 1440, 60)
        assert got["yesterday_hour_before"] == rows(m, 1500, 60)
        assert got["last_week_1h"] == rows(m, 7 * 1440, 60)
        assert got["hour_ago_5min"] == rows(m, 60, 5)
        assert got["days_mean_4h"] == pytest.approx(np.mean([rows(m, k * 1440, 240) for k in range(1, 8)]))
        assert got["days_used_15min"] == pytest.approx(np.mean([rows(m, k * 1440, 15) > 0 for k in range(1, 8)]))
        assert got["weeks_mean_6h"] == np.mean([rows(m, k * 7 * 1440, 360) for k in (1, 2)])
        later = minute[(model[past] == m) & (minute >= now - 1440)] - (now - 1440)
        assert got["next_use_yesterday_min"] == (later.min() if len(later) else 1440.0)
        own = ts[past][model[past] == m]
        assert got["log_age"] == pytest.approx(np.log(now_s - own[-1] + 1.0), rel=1e-6)
        assert got["log_gap_1"] == pytest.approx(np.log(own[-1] - own[-2] + 1.0), rel=1e-6)


def test_gaps_fall_into_half_octaves() -> None:
    traffic = Traffic()
    gaps = [0.0, 1.0, 2.0, 3.0, 64.0, 1e6]
    traffic.add(START_S + np.cumsum([0.0, *gaps]), np.zeros(7, int))
    bins = [0, 0, 2, 3, 12, 35]
    expected = np.bincount(bins, minlength=36)
    assert traffic.gap_histogram[0].tolist() == expected.tolist()


def test_a_follower_is_known_by_the_model_that_it_follows() -> None:
    ts, model = [], []
    for k in range(40):
        ts += [START_S + 7200.0 * k, START_S + 7200.0 * k + 60.0, START_S + 7200.0 * k + 3600.0]
        model += [0, 1, 2]
    traffic = Traffic()
    traffic.add([*ts, START_S + 7200.0 * 40], [*model, 0])
    features = traffic.features(START_S + 7200.0 * 40 + 1.0)
    assert features[1, column("follower_max")] > 0.8
    assert features[2, column("follower_max")] == 0.0


def test_a_users_habits_raise_the_models_that_the_user_uses() -> None:
    ts, model, user = [], [], []
    for k in range(30):
        at = START_S + 10_000.0 * k
        ts += [at, at + 400.0, at + 5000.0, at + 5400.0]
        model += [0, 1, 2, 3]
        user += [7, 7, 10**15, 10**15]
    traffic = Traffic()
    traffic.add([*ts, START_S + 300_000.0], [*model, 0], [*user, 7])
    features = traffic.features(START_S + 300_030.0)
    assert features[1, column("user_switch")] > 0.8 * np.exp(-0.1)
    assert features[3, column("user_switch")] == 0.0
    assert features[1, column("user_share_max")] > 0.4
    assert features[3, column("user_share_max")] == 0.0


def test_tables_are_bounded_and_keep_what_is_frequent() -> None:
    rng = np.random.default_rng(0)
    rows = 30_000
    ts = START_S + np.cumsum(rng.exponential(700.0, rows))
    model = np.where(rng.random(rows) < 0.5, rng.integers(0, 4, rows), rng.integers(4, 200, rows))
    user = rng.integers(0, 20_000, rows)
    user[::2] = 5
    traffic = Traffic()
    traffic.add(ts, model, user)
    taken = traffic.snapshot()
    assert taken["user_id"].shape == (USER_BUCKETS, USER_WAYS)
    assert taken["user_model"].shape[2] == MODELS_PER_USER
    assert 5 in taken["user_id"]
    assert taken["follower"].shape == (200, FOLLOWERS)
    place = np.argwhere(taken["user_id"] == 5)[0]
    assert {0, 1, 2, 3} <= set(taken["user_model"][tuple(place)].tolist())
    assert (taken["user_w"][tuple(place)] <= 500.0).all()


@pytest.mark.parametrize("stride", [1, 1024, 2**40])
def test_users_are_kept_however_they_are_numbered(stride: int) -> None:
    users = np.arange(2000) * stride
    traffic = Traffic()
    traffic.add(START_S + np.arange(2000.0), np.zeros(2000, int), users)
    assert np.isin(users, traffic.snapshot()["user_id"]).mean() > 0.98


def test_late_rows_count_with_their_models_last_row_and_too_late_ones_not_at_all() -> None:
    late, moved = Traffic(), Traffic()
    late.add([START_S, START_S + 500.0, START_S + 490.0, START_S + 600.0], [0, 1, 1, 0])
    moved.add([START_S, START_S + 500.0, START_S + 500.0, START_S + 600.0], [0, 1, 1, 0])
    now_s = START_S + 700.0
    assert same_bits(late.features(now_s), moved.features(now_s))
    assert (late.late_rows, late.dropped_rows, late.rows) == (1, 0, 4)
    before = late.features(now_s)
    block = late.advance([START_S + 599.0 - LATE_S], [1])
    assert np.isnan(block.row_features).all()
    assert same_bits(before, late.features(now_s))
    assert (late.dropped_rows, late.rows) == (1, 4)


def test_the_future_of_the_log_does_not_enter() -> None:
    ts, model, user, count = random_log(11, 600, 9.0)
    cut = 400
    ticks = np.arange(ts[0], ts[cut], 3600.0)
    short, long = Traffic(12), Traffic(12)
    a = short.advance(ts[:cut], model[:cut], user[:cut], count[:cut], ticks=ticks)
    b = long.advance(ts, model, user, count, ticks=np.concatenate([ticks, [ts[-1]]]))
    assert same_bits(a.row_features, b.row_features[:cut])
    assert same_bits(a.tick_features, b.tick_features[: len(a.tick_of)])


def test_features_are_finite_even_where_little_is_known() -> None:
    traffic = Traffic(3)
    assert np.isnan(traffic.features(START_S)).all()
    assert traffic.rates(START_S).tolist() == np.zeros((3, len(TAUS_S))).tolist()
    traffic.add([START_S], [1])
    for after_s in (0.0, 1.0, 100 * DAY_S):
        features = traffic.features(START_S + after_s)
        assert np.isfinite(features[1]).all()
        assert np.isnan(features[[0, 2]]).all()


@pytest.mark.parametrize(
    ("ts", "model", "match"),
    [([1.0], [-1], "start at 0"), ([np.nan], [0], "finite"), ([1.0, 2.0], [0], "different lengths")],
)
def test_rows_that_cannot_be_are_refused(ts: list[float], model: list[int], match: str) -> None:
    traffic = Traffic(1)
    with pytest.raises(ValueError, match=match):
        traffic.add(ts, model)
    assert traffic.rows == 0


def test_models_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="numbered from 0 to 1"):
        Traffic(2).features(START_S, [2])


def test_one_block_without_features_is_cheap_and_leaves_the_same_state() -> None:
    ts, model, user, count = random_log(2, 300, 1.0)
    with_features, without = Traffic(), Traffic()
    with_features.advance(ts, model, user, count, ticks=[ts[-1] + 1.0])
    block = without.advance(ts, model, user, count, ticks=[ts[-1] + 1.0], features=False)
    assert block.row_features.shape == (0, len(FEATURE_NAMES))
    assert len(block.tick_of) == 0
    assert same_bits(with_features.features(ts[-1] + 9.0), without.features(ts[-1] + 9.0))
