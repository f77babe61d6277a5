"""A backtest: windows by brute force, nothing from the future, failures counted and kept out, and what it writes and says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetcher.backtest import plan
from prefetcher.backtest.command import backtest, backtest_command
from prefetcher.backtest.contenders import Contender
from prefetcher.backtest.outcomes import Outcomes, Rows, walk
from prefetcher.backtest.plan import make_plan, sampled_models
from prefetcher.backtest.segments import SEGMENTS
from prefetcher.cli import app, main
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import InputError, PredictorError, UsageError
from prefetcher.replay.trace import Trace, read_trace
from prefetcher_models.check_predictor import check_predictor
from prefetcher_models.hazard import Hazard, HazardSettings
from prefetcher_models.popularity import Popularity
from prefetcher_models.predictor import Forecast
from prefetcher_models.registry import BASELINES, PREDICTORS, Entry, entry, missing_packages
from prefetcher_models.seasonal_naive import SeasonalNaive
from prefetcher_models.sources import Sources

DAY_S = 86400.0
START_S = 1_700_000_123.4
SIMPLE = [entry("seasonal-naive"), entry("popularity-24h"), entry("idle-time")]


@pytest.fixture(autouse=True, scope="module")
def few_windows() -> Iterator[None]:
    """Of a minute and of two some windows are drawn, of longer horizons all are asked for: seconds instead of minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MOST_PAIRS", 7_000)
        yield


def small_hazard() -> Entry:
    settings = HazardSettings(trees=5, samples=2_000, fewest_samples=100, growth=2.0, horizons=(1, 3))
    return Entry("hazard", "learned", "a small hazard", lambda names: Hazard(settings, names=names))


def small_log(days: float = 3.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three timers (20 min, 1 h, 6 h), one that is busy in the mornings, two at random, and one that begins late."""
    rng = np.random.default_rng(seed)
    end_s = days * DAY_S
    parts = [(np.arange(rng.uniform(0, gap), end_s, gap), m) for m, gap in enumerate((1200.0, 3600.0, 21600.0))]
    mornings = np.concatenate([d * DAY_S + 8 * 3600.0 + np.sort(rng.uniform(0, 7200.0, 15)) for d in range(int(days))])
    parts += [(mornings, 3), (np.sort(rng.uniform(0, end_s, 60)), 4), (np.sort(rng.uniform(0, end_s, 15)), 5)]
    parts += [(np.sort(rng.uniform(0.7 * end_s, end_s, 40)), 6)]
    ts = np.concatenate([t for t, _ in parts]) + START_S
    model = np.concatenate([np.full(len(t), m) for t, m in parts])
    order = np.argsort(ts, kind="stable")
    return ts[order], model[order]


def rows_of(ts: np.ndarray, model: np.ndarray, models: int = 8) -> Rows:
    return Rows(ts, model.astype(np.int64), np.full(len(ts), -1, np.int64), np.ones(len(ts), np.int64), models)


def csv_of(path: Path, ts: np.ndarray, model: np.ndarray) -> Path:
    path.write_text("ts,model\n" + "".join(f"{t:.3f},m{m}\n" for t, m in zip(ts, model, strict=True)))
    return path


def outcomes_of(ts: np.ndarray, model: np.ndarray, entries: list[Entry], until_s: float | None = None) -> list[Outcomes]:
    asked = make_plan(float(ts[0]), until_s or float(ts[-1]), 8, warmup_ratio=0.3, origins=3, seed=0)
    return walk(rows_of(ts, model), asked, [Contender(one) for one in entries])


def test_windows_and_starts_are_those_of_brute_force() -> None:
    ts, model = small_log()
    found = outcomes_of(ts, model, SIMPLE)
    t0, t1 = float(ts[0]), float(ts[-1])
    from_s = t0 + 0.3 * (t1 - t0)
    for h, horizon_s in enumerate(HORIZONS_S):
        if horizon_s < 300.0:
            continue
        step_s = min(horizon_s, 1800.0)
        used: list[bool] = []
        for k in range(1, 10_000):
            t = t0 + k * step_s
            if t + horizon_s > t1:
                break
            if t < max(from_s, t0 + horizon_s):
                continue
            for m in range(8):
                own = ts[model == m]
                if not ((own >= t - horizon_s) & (own < t)).any():
                    used.append(bool(((own >= t) & (own < t + horizon_s)).any()))
        assert found[h].used.tolist() == used, horizon_s
        assert all(len(p) == len(used) and np.isfinite(p).all() for p in found[h].p.values())
        assert set(found[h].origin.tolist()) == {0, 1, 2}


def test_what_is_said_at_a_moment_does_not_depend_on_what_comes_later() -> None:
    ts, model = small_log()
    end_s = float(ts[-1])
    cut_s = START_S + 2.0 * DAY_S
    other_ts, other_model = small_log(seed=1)
    before, later = ts < cut_s, (other_ts >= cut_s) & (other_ts < end_s)
    mixed_ts = np.concatenate([ts[before], other_ts[later]])
    mixed_model = np.concatenate([model[before], other_model[later]])
    entries = [*SIMPLE, small_hazard(), entry("tsb"), entry("hit-density")]
    one, two = outcomes_of(ts, model, entries, end_s), outcomes_of(mixed_ts, mixed_model, entries, end_s)
    h = HORIZONS_S.index(600.0)
    first_origin = int((one[h].origin == 0).sum())
    assert first_origin > 100
    # the first stretch ends before the cut
    for name, p in one[h].p.items():
        assert p[:first_origin].tobytes() == two[h].p[name][:first_origin].tobytes(), name
    assert one[h].used.tolist() != two[h].used.tolist()


def test_segments_are_told_by_what_was_known() -> None:
    ts, model = small_log()
    (of,) = [found for h, found in enumerate(outcomes_of(ts, model, [entry("idle-time")])) if HORIZONS_S[h] == 600.0]
    names = [name for name, _ in SEGMENTS]
    counts = {name: int((of.segment == i).sum()) for i, name in enumerate(names)}
    # Model 7 of eight never comes, model 6 comes at 70 %; the timers are regular.
    assert counts["never seen"] > counts["new"] > 0
    assert counts["regular"] > 0
    assert counts["now and then"] > 0


class Fails(SeasonalNaive):
    """Fails in `learn` or `forecast`, or says what is no probability, from its tenth call on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how
        self._calls = 0

    def forecast(self, traffic, now_s, models=None):
        self._calls += 1
        said = super().forecast(traffic, now_s, models)
        if self._calls < 10:
            return said
        if self._how == "raises":
            raise PredictorError("no more", predictor=self.name)
        if self._how == "dies":
            raise ZeroDivisionError("by zero")
        return Forecast(self.name, now_s, now_s, said.models, np.full_like(said.p, np.nan))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(csv_of(tmp_path_factory.mktemp("log") / "log.csv", *small_log()), default_bytes=1)


@pytest.fixture(scope="module")
def alone(log: Trace) -> dict[str, Any]:
    """What the simple ones alone come to."""
    return backtest(log, SIMPLE, origins=3)


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "PredictorError: no more"), ("dies", "ZeroDivisionError: by zero"), ("says nan", "are not finite")]
)
def test_a_predictor_that_fails_is_named_counted_and_kept_out(log: Trace, alone: dict[str, Any], how: str, said: str) -> None:
    failing = Entry("failing", "learned", "fails", lambda _names: Fails(how))
    both = backtest(log, [*SIMPLE, failing], origins=3)
    told = {p["name"]: p for p in both["predictors"]}
    assert told["failing"]["failed"] == told["failing"]["asked"] - 9
    ((reason, count),) = told["failing"]["failures"].items()
    assert reason.startswith("forecast: ")
    assert said in reason
    assert count == told["failing"]["failed"]
    assert any("failing failed" in note for note in both["input"]["notes"])
    # The others are scored as without it, and it only on what it said.
    assert [e for e in both["scores"] if e["predictor"] != "failing"] == alone["scores"]
    own = [e for e in both["scores"] if e["predictor"] == "failing" and e["segment"] == "all"]
    assert all(e["pairs"] < 100 and e["left_out"] > 0 for e in own)


def test_a_predictor_that_can_not_be_made_has_no_scores(log: Trace) -> None:
    def refuse(_names: tuple[str, ...]) -> SeasonalNaive:
        raise ImportError("no module named prophet")

    result = backtest(log, [*SIMPLE, Entry("absent", "learned", "is absent", refuse)], origins=1)
    (told,) = [p for p in result["predictors"] if p["name"] == "absent"]
    assert (told["scored"], list(told["failures"])) == (False, ["make: ImportError: no module named prophet"])
    assert not [e for e in result["scores"] if e["predictor"] == "absent"]
    left_out = backtest(log, [*SIMPLE, Entry("absent", "learned", "is absent", refuse, needs=("no_such_package",))], origins=1)
    assert left_out["input"]["notes"] == ["absent is left out: it needs no_such_package"]


def test_a_baseline_is_compared_on_the_same_forecasts(alone: dict[str, Any]) -> None:
    entries = {e["predictor"]: e for e in alone["scores"] if e["horizon_s"] == 600.0 and e["segment"] == "all"}
    over = entries["idle-time"]["over"]["popularity-24h"]
    assert over["ap"] == pytest.approx(entries["popularity-24h"]["ap"], rel=1e-5)
    assert over["ap_ratio"] == pytest.approx(entries["idle-time"]["ap"] / entries["popularity-24h"]["ap"], rel=1e-4)
    assert "seasonal-naive" not in entries["seasonal-naive"]["over"]
    # Timers: their own gaps tell more than how often they were used.
    assert over["ap_ratio"] > 1.0
    assert over["ap_ratio_spread"]["n"] == 3


@pytest.mark.usefixtures("no_progress")
def test_the_command_says_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = csv_of(tmp_path / "log.csv", *small_log())
    names = "seasonal-naive,popularity-24h,idle-time"
    for i in (1, 2):
        backtest_command(log=log, predictors=names, origins=3, json_to=tmp_path / f"{i}.json", report=tmp_path / f"{i}.html")
    said = capsys.readouterr()
    assert said.err == ""
    assert "idle-time foresees starts within 10 min best: average precision" in said.out
    assert "times seasonal-naive" in said.out
    assert "average precision by horizon" in said.out
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    result = json.loads((tmp_path / "1.json").read_text())
    assert {e["horizon_s"] for e in result["scores"]} == set(HORIZONS_S)
    page = (tmp_path / "1.html").read_text()
    assert page == (tmp_path / "2.html").read_text()
    # Nothing is fetched, and figures are those of the document.
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)=|url\(", outside)
    figures = json.loads(re.search(r'<script id="figures" type="application/json">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert set(figures) == {"horizons", "reliability-600", "reliability-3600", "reliability-21600", "segments"}
    assert all(f'id="chart-{key}"' in page for key in figures)
    drawn = {line["name"]: line["y"] for line in figures["horizons"]["data"]}
    told = {e["predictor"]: e["ap"] for e in result["scores"] if e["horizon_s"] == 600.0 and e["segment"] == "all"}
    at = result["horizons_s"].index(600.0)
    assert {name: y[at] for name, y in drawn.items()} == told


def test_of_many_models_a_sample_by_hash_is_taken_and_said(tmp_path: Path) -> None:
    ts, model = small_log()
    trace = read_trace(csv_of(tmp_path / "log.csv", ts, model), default_bytes=1)
    result = backtest(trace, SIMPLE, origins=2, most_models=4)
    assert result["input"]["asked_models"] == 4
    (note,) = result["input"]["notes"]
    assert note.startswith("4 of 7 models, drawn by the hash of their names")
    names = [f"model-{i}" for i in range(100)]
    kept = sampled_models(names, 10, 0)
    assert kept.sum() == 10
    # Further models push some out, and let none in but themselves.
    more = sampled_models([*names, *(f"other-{i}" for i in range(50))], 10, 0)
    assert not (more[:100] & ~kept).any()
    assert sampled_models(names, 10, 1).tolist() != kept.tolist()


def test_windows_of_many_models_are_drawn_and_stay_bounded() -> None:
    made = make_plan(0.0, 14 * DAY_S, 20, warmup_ratio=0.3, origins=5, seed=0)
    for times, ratio in zip(made.times, made.drawn_ratio, strict=True):
        assert 0 < len(times) * 20 <= 7_000
        assert ratio < 1.0
        assert np.bincount(made.origin_of(times), minlength=5).min() >= 2
    # In step with no cycle: minutes of the hour are all drawn alike.
    minute = (made.times[0] / 60.0 % 60.0).astype(int)
    assert np.bincount(minute // 15, minlength=4).min() > len(minute) / 8


def test_a_log_that_is_too_short_is_said(tmp_path: Path) -> None:
    log = csv_of(tmp_path / "log.csv", START_S + np.arange(5) * 60.0, np.arange(5) % 2)
    with pytest.raises(InputError, match=r"spans 4 minutes, too short for a backtest with 5 origins .* give a log of"):
        backtest_command(log=log)
    # Three hours: nothing can be said of six, the rest is.
    rng = np.random.default_rng(0)
    ts = START_S + np.sort(rng.uniform(0, 3 * 3600.0, 200))
    trace = read_trace(csv_of(log, ts, rng.integers(0, 5, 200)), default_bytes=1)
    result = backtest(trace, SIMPLE, origins=2)
    assert 21600.0 not in result["horizons_s"]
    assert 60.0 in result["horizons_s"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"origins": 0}, "at least 1"),
        ({"warmup_ratio": 1.0}, "below 1"),
        ({"waste": 0.0}, "--waste"),
        ({"predictors": "hazard,prophecy"}, "no predictor is called 'prophecy'"),
        ({"predictors": ","}, "no predictor named"),
        ({"json_to": Path("/no/such/folder/x.json")}, "there is no folder"),
    ],
)
def test_what_can_not_be_asked_is_said(tmp_path: Path, given: dict[str, object], said: str) -> None:
    log = csv_of(tmp_path / "log.csv", *small_log(2.0))
    with pytest.raises(UsageError, match=said):
        backtest_command(log=log, **given)  # type: ignore[arg-type]


def test_a_log_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prefetcher", "backtest", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert app is not None


def test_the_registry_names_each_predictor_once_and_each_keeps_the_contract() -> None:
    assert len({one.name for one in PREDICTORS}) == len(PREDICTORS)
    for one in PREDICTORS:
        if missing_packages(one):
            continue
        names = Sources(one.sources()).names
        assert one.name.startswith(one.make(names).name)
    assert {one.name for one in PREDICTORS} > set(BASELINES)
    check_predictor(Popularity)


def test_sources_give_the_hazard_their_columns(tmp_path: Path) -> None:
    trace = read_trace(csv_of(tmp_path / "log.csv", *small_log(1.0)), default_bytes=1)
    widened = replace(small_hazard(), name="hazard-wide", sources=entry("hazard-transitions").sources)
    result = backtest(trace, [small_hazard(), widened, *SIMPLE], origins=1)
    told = {p["name"]: p for p in result["predictors"]}
    assert told["hazard-wide"]["failures"] == {}
    assert told["hazard-wide"]["scored"]
    aps = [[e["ap"] for e in result["scores"] if e["predictor"] == name] for name in ("hazard", "hazard-wide")]
    assert aps[0] != aps[1]


@pytest.mark.traces
@pytest.mark.skipif("PREFETCHER_TRACES" not in os.environ, reason="PREFETCHER_TRACES names no folder of traces")
def test_popularity_is_as_hard_to_beat_as_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_PAIRS", 80_000)
    folder = Path(os.environ["PREFETCHER_TRACES"])
    trace = read_trace(folder / "genai_sd.parquet", catalog=folder / "genai_sd.catalog.json")
    result = backtest(trace, [entry("popularity-24h")], origins=3, warmup_ratio=0.6)
    (found,) = [e for e in result["scores"] if e["horizon_s"] == 600.0 and e["segment"] == "all"]
    assert found["ap"] == pytest.approx(0.10, abs=0.015)
