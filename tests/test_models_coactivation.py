"""What follows what: the transition table as columns, and the sequence model that is in force only where it beats the table."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

from prefetcher.core.traffic import Block, Traffic
from prefetcher.errors import PredictorError
from prefetcher_models.coactivation import Coactivation, CoactivationSettings
from prefetcher_models.coactivation_file import load_coactivation, save_coactivation
from prefetcher_models.coactivation_net import NetSettings
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.follow_state import COLUMNS
from prefetcher_models.transitions import Transitions

START_S = 1_700_000_123.4
HOUR_S = 3600.0
N = 12
SMALL = CoactivationSettings(first_fit_s=7200.0, growth=0.3, fewest=500, most=3000, net=NetSettings(batch=512))

Log = tuple[np.ndarray, np.ndarray, np.ndarray]


def sessions(hours: float, seed: int, *, second_order: bool, users: int = 30) -> Log:
    """Users who go through some models about a minute apart, several times a day.

    With `second_order` the first model tells the third, and all go through the same second one: 0 → 4 → 6, 1 → 4 → 7, 2 → 4 → 8,
    3 → 4 → 9. Otherwise each next model is one that the user used before, as often as he did, or any: what the table takes for granted.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int]] = []
    for user in range(users):
        t = rng.exponential(2.0 * HOUR_S)
        used = np.zeros(N)
        model = -1
        while t < hours * HOUR_S:
            first = int(rng.integers(4))
            path = [first, 4, 6 + first, 5] if second_order else [-1] * int(rng.geometric(0.25))
            for wanted in path:
                if wanted < 0:
                    chance = used + 2.0 / N
                    chance[model] = 0.0 if model >= 0 else chance[model]
                    model = int(rng.choice(N, p=chance / chance.sum()))
                else:
                    model = wanted
                used[model] += 1.0
                rows.append((t, model, user))
                t += rng.uniform(25.0, 150.0) if second_order else rng.exponential(60.0)
            t += rng.exponential(1.5 * HOUR_S)
    rows.sort()
    ts, models, owner = (np.array(column) for column in zip(*rows, strict=True))
    inside = ts < hours * HOUR_S
    return START_S + ts[inside], models[inside].astype(np.int64), owner[inside].astype(np.int64)


def chain(hours: float, seed: int) -> Log:
    """No users: model 1 starts 20 s after every start of model 0; the others come at random."""
    rng = np.random.default_rng(seed)
    beats = np.arange(500.0, hours * HOUR_S, 1487.0)
    other = rng.uniform(0.0, hours * HOUR_S, int(hours * 20))
    ts = np.concatenate([beats, beats + 20.0, other])
    model = np.concatenate([np.zeros(len(beats)), np.ones(len(beats)), rng.integers(2, N, len(other))]).astype(np.int64)
    order = np.argsort(ts, kind="stable")
    return START_S + ts[order], model[order], np.full(len(ts), -1)


def go(source: FeatureSource, log: Log, bounds: np.ndarray, traffic: Traffic | None = None, from_s: float = START_S):
    """The log through a source in blocks with these ends, asked for a fit at whole hours: columns of rows and ticks, with their times."""
    ts, model, user = log
    traffic = traffic or Traffic(N)
    ticks = START_S + 60.0 * np.arange(100_000)
    rows, at_ticks, blocks = [], [], []
    hours = np.arange(np.ceil(START_S / HOUR_S) * HOUR_S, bounds[-1], HOUR_S)
    for end_s in np.unique(np.concatenate([bounds, hours])):
        if end_s <= from_s:
            continue
        block = advance(traffic, ts, model, user, ticks, from_s, float(end_s))
        of_rows, of_ticks = source.columns(traffic, block)
        assert of_rows.shape == (len(block.ts), len(COLUMNS))
        assert of_ticks.shape == (len(block.tick_of), len(COLUMNS))
        rows.append(of_rows)
        at_ticks.append(of_ticks)
        blocks.append(block)
        if end_s % HOUR_S == 0.0:
            source.refit(float(end_s))
        from_s = float(end_s)
    when = np.concatenate([b.ticks[b.tick_of] for b in blocks])
    who = np.concatenate([b.tick_model for b in blocks])
    return np.concatenate(rows), np.concatenate(at_ticks), when, who, traffic


def advance(traffic: Traffic, ts: np.ndarray, model: np.ndarray, user: np.ndarray, ticks: np.ndarray, from_s: float, end_s: float) -> Block:
    inside = slice(*np.searchsorted(ts, [from_s, end_s]))
    mine = ticks[slice(*np.searchsorted(ticks, [from_s, end_s]))]
    return traffic.advance(ts[inside], model[inside], user[inside], ticks=mine, from_s=from_s, until_s=end_s)


def whole(log: Log) -> np.ndarray:
    return np.arange(START_S, log[0][-1] + 1801.0, 1800.0)[1:]


@pytest.fixture(scope="module")
def learned() -> tuple[Log, Coactivation, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    log = sessions(40.0, 1, second_order=True)
    source = Coactivation(SMALL)
    rows, ticks, when, who, _ = go(source, log, whole(log))
    return log, source, rows, ticks, when, who


def loss(p: np.ndarray, used: np.ndarray) -> float:
    p = np.clip(p.astype(float), 1e-4, 1.0 - 1e-4)
    return float(-np.where(used, np.log(p), np.log1p(-p)).mean())


def due(log: Log, when: np.ndarray, who: np.ndarray) -> np.ndarray:
    """Seconds until each (tick, model)'s next use."""
    ts, model, _ = log
    out = np.empty(len(when))
    for m in range(N):
        times = np.append(ts[model == m], np.inf)
        out[who == m] = times[np.searchsorted(times, when[who == m], side="left")] - when[who == m]
    return out


def test_where_the_second_last_model_tells_the_next_one_the_sequence_model_takes_over(learned) -> None:
    log, source, _, ticks, when, who = learned
    choice = source.choice
    assert choice["in_force"] == "sequence"
    assert choice["log_loss"]["sequence"] < 0.9 * choice["log_loss"]["table"]
    assert choice["fits"] > 3
    assert choice["uses"] > 30
    table = go(Transitions(), log, whole(log))[1]
    late = (when > START_S + 25.0 * HOUR_S) & (who >= 6) & (who <= 9)
    used = due(log, when, who)[late] <= 120.0
    assert used.sum() > 50
    assert loss(ticks[late, 0], used) < 0.9 * loss(table[late, 0], used)


def test_where_the_next_model_follows_from_nothing_the_table_stays() -> None:
    log = sessions(30.0, 2, second_order=False)
    source = Coactivation(SMALL)
    _, ticks, *_ = go(source, log, whole(log))
    choice = source.choice
    assert choice["in_force"] == "table"
    assert choice["fits"] > 3
    assert choice["log_loss"]["sequence"] > 0.99 * choice["log_loss"]["table"]
    assert choice["fallbacks"]["loses to the table"] > 0
    assert np.isfinite(ticks).all()


def test_columns_are_chances_and_a_number_of_users(learned) -> None:
    _, _, rows, ticks, *_ = learned
    for columns in (rows, ticks):
        assert np.isfinite(columns).all()
        chances = columns[:, [0, 1, 3, 4, 5]]
        assert chances.min() >= 0.0
        assert chances.max() <= 1.0
        assert (columns[:, 1] >= columns[:, 0] - 1e-6).all()
        assert (columns[:, 2] == np.round(columns[:, 2])).all()
    assert ticks[:, 0].max() > 0.2
    assert ticks[:, 2].max() >= 2.0


def test_what_starts_after_what_is_found_without_users_and_torch_is_never_asked() -> None:
    log = chain(20.0, 3)
    source = Coactivation(SMALL)
    _, ticks, when, who, _ = go(source, log, whole(log))
    assert (ticks[:, :3] == 0.0).all()
    assert source.fits == 0
    assert source.choice["in_force"] == "table"
    ts, model, _ = log
    # a tick that falls into the 20 s between a beat and what follows it
    last = np.array([ts[(model == 0) & (ts < t)].max(initial=-np.inf) for t in when])
    between = (who == 1) & (when - last < 19.0) & (when > START_S + 10.0 * HOUR_S)
    assert between.sum() > 3
    assert ticks[between, 3].min() > 0.5
    apart = (who == 1) & (when - last > 700.0) & (when > START_S + 10.0 * HOUR_S)
    assert ticks[apart, 3].mean() < 0.1
    assert ticks[between, 5].min() <= ticks[between, 3].min() + 1e-6


@pytest.mark.parametrize("make", [Transitions, lambda: Coactivation(SMALL)])
def test_bounds_of_blocks_change_nothing(make, learned) -> None:
    log = tuple(column[: len(learned[0][0]) // 2] for column in learned[0])
    one = go(make(), log, whole(log))
    rng = np.random.default_rng(5)
    bounds = np.sort(np.append(rng.uniform(START_S, whole(log)[-1], 60), whole(log)[-1]))
    other = go(make(), log, bounds)
    assert one[0].tobytes() == other[0].tobytes()
    assert one[1].tobytes() == other[1].tobytes()


@pytest.mark.parametrize("make", [Transitions, lambda: Coactivation(SMALL)])
def test_the_future_changes_nothing(make, learned) -> None:
    ts, model, user = (column[: len(learned[0][0]) // 2] for column in learned[0])
    cut_s = ts[len(ts) * 2 // 3]
    past = ts < cut_s
    changed = (np.where(past, ts, ts + 7.0), np.where(past, model, (model + 1) % N), np.where(past, user, 29 - user))
    bounds = whole(changed)
    rows, ticks, when, *_ = go(make(), (ts, model, user), bounds)
    rows_2, ticks_2, when_2, *_ = go(make(), changed, bounds)
    assert rows[past].tobytes() == rows_2[past].tobytes()
    assert rows[~past].tobytes() != rows_2[~past].tobytes()
    assert ticks[when < cut_s].tobytes() == ticks_2[when_2 < cut_s].tobytes()


@pytest.mark.parametrize("make", [Transitions, lambda: Coactivation(SMALL)])
def test_a_restart_goes_on_as_if_nothing_had_happened(make, learned) -> None:
    log = tuple(column[: len(learned[0][0]) // 2] for column in learned[0])
    bounds = whole(log)
    straight = make()
    rows, ticks, *_ = go(straight, log, bounds)
    half = len(bounds) * 2 // 3
    first, second = make(), make()
    rows_1, ticks_1, _, _, traffic = go(first, log, bounds[:half])
    second.restore({name: array.copy() for name, array in first.snapshot().items()})
    rows_2, ticks_2, *_ = go(second, log, bounds, Traffic.restore(traffic.snapshot()), float(bounds[half - 1]))
    assert np.concatenate([rows_1, rows_2]).tobytes() == rows.tobytes()
    assert np.concatenate([ticks_1, ticks_2]).tobytes() == ticks.tobytes()
    ours, theirs = straight.snapshot(), second.snapshot()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_foreign_snapshots_are_refused(learned) -> None:
    taken = learned[1].snapshot()
    for make, good in ((lambda: Coactivation(SMALL), taken), (Transitions, Transitions(3).snapshot())):
        lacking = {name: array for name, array in good.items() if not name.endswith("visit_s")}
        newer = {**good, "version": np.array(99)}
        for bad in (lacking, newer, {}):
            with pytest.raises(PredictorError):
                make().restore(bad)


def test_without_torch_the_table_stays_in_force_and_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name, *args, **kwargs):
        if name.split(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    log = sessions(12.0, 1, second_order=True)
    source = Coactivation(SMALL)
    _, ticks, *_ = go(source, log, whole(log))
    assert source.choice["in_force"] == "table"
    assert source.choice["fallbacks"]["torch is not installed"] >= 2
    assert source.fits == 0
    assert ticks.tobytes() == go(Transitions(), log, whole(log))[1].tobytes()


def test_a_file_brings_the_same_network_back_for_models_in_another_order(tmp_path: Path, learned) -> None:
    log, source, *_ = learned
    names = [f"m{i}" for i in range(N)]
    path = tmp_path / "coactivation.safetensors"
    digest = save_coactivation(source, path, names)
    first = path.read_bytes()
    assert save_coactivation(source, path, names) == digest
    assert path.read_bytes() == first
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["digest"] == digest
    assert card["choice"]["in_force"] == "sequence"
    assert card["models"] == names
    turned = list(reversed(names))
    other = Coactivation(SMALL)
    load_coactivation(other, path, turned)
    assert other.choice["in_force"] == "sequence"
    # from here on the network stays as it is in both: only the numbering differs
    again = Coactivation(SMALL)
    load_coactivation(again, path, names)
    short = tuple(column[:300] for column in log)
    mirrored = (short[0], N - 1 - short[1], short[2])
    bounds = np.array([short[0][-1] + 60.0])
    _, one, when, who, _ = go(again, short, bounds)
    _, two, when_2, who_2, _ = go(other, mirrored, bounds)
    order, order_2 = np.lexsort((who, when)), np.lexsort((N - 1 - who_2, when_2))
    np.testing.assert_allclose(one[order][:, :2], two[order_2][:, :2], rtol=1e-5)
    assert one[:, 0].max() > 0.0


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, learned) -> None:
    names = [f"m{i}" for i in range(N)]
    path = tmp_path / "net.safetensors"
    save_coactivation(learned[1], path, names)
    good, card = path.read_bytes(), path.with_suffix(".json").read_text(encoding="utf-8")
    flipped = bytearray(good)
    flipped[-3] ^= 0x40
    for content, text, found in (
        (bytes(flipped), card, "digest"),
        (good[: len(good) // 2], card, "digest"),
        (good, card.replace('"version": 1', '"version": 7'), "version 7"),
        (good, card.replace('"prefetcher coactivation"', '"something else"'), "is no"),
        (good, card[:40], "can't be read"),
    ):
        path.write_bytes(content)
        path.with_suffix(".json").write_text(text, encoding="utf-8")
        source = Coactivation(SMALL)
        with pytest.raises(PredictorError, match=found):
            load_coactivation(source, path, names)
        assert source.choice["in_force"] == "table"
    with pytest.raises(PredictorError, match="can't be read"):
        load_coactivation(Coactivation(SMALL), tmp_path / "absent.safetensors", names)
