"""`bench windows` and `bench regime` over a small log: figures follow from the points, and what can't be run is refused first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_tuning import two_kinds

from prefetcher.bench import regime, windows
from prefetcher.core.windows import window_in_words
from prefetcher.errors import InputError, UsageError


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of six days and one of two, which is too short."""
    folder = tmp_path_factory.mktemp("suite")
    for name, days in (("six", 6), ("two", 2)):
        two_kinds(folder / name, days)
        (folder / name / "log.parquet").rename(folder / f"{name}.parquet")
        (folder / name / "sizes.json").rename(folder / f"{name}.catalog.json")
    points = [{"trace": name, "capacity_ratio": [0.2, 0.4]} for name in ("six", "two")]
    (folder / "suite.json").write_text(json.dumps({"link_bytes_per_s": 3.5e9, "points": points}))
    return folder


@pytest.mark.slow
def test_what_tuned_windows_cost_over_the_best_fixed_one(suite: Path) -> None:
    said: list[str] = []
    windows.run(suite / "w.json", suite=suite / "suite.json", traces=suite, say=said.append)
    result = json.loads((suite / "w.json").read_text())
    (point,) = result["points"]
    assert (point["trace"], point["capacity_ratio"]) == ("six", 0.2)
    assert len(said) == 1
    ratios = [start["cost_ratio"] for start in point["starts"].values()]
    assert set(point["starts"]) == {"bad", "timid"}
    assert result["figures"]["cost_ratio_worst"] == max(ratios)
    assert 0.5 < max(ratios) < 1.2
    assert result["peers"] == {"six": {word: start["over_untuned"] for word, start in point["starts"].items()}}
    for start in point["starts"].values():
        assert start["over_untuned"] == pytest.approx(start["cost_ratio"] / point["default_ratio"])
    assert (point["models"], point["tuned_models"]) == (12, 12)
    assert point["fixed_spread"] >= max(start["start_ratio"] for start in point["starts"].values()) >= 1.0
    assert point["best_fixed"] in [window_in_words(window) for window in windows.FIXED]


@pytest.mark.slow
def test_days_until_tuned_windows_are_good_again(suite: Path) -> None:
    regime.run(suite / "r.json", suite=suite / "suite.json", traces=suite, trace="six", say=lambda _line: None)
    result = json.loads((suite / "r.json").read_text())
    (point,) = result["points"]
    assert point["changed_day"] == 3
    assert result["figures"]["days"] == point["days"]
    assert len(point["over_best_by_day"]) in (3, 4)


@pytest.mark.parametrize("bench", [windows, regime])
def test_what_cannot_be_run_is_refused(suite: Path, bench: object, tmp_path: Path) -> None:
    run = bench.run  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="needs --suite FILE and --traces DIR"):
        run(tmp_path / "out.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match="is no suite"):
        run(tmp_path / "out.json", suite=tmp_path / "bad.json", traces=suite)
    with pytest.raises(UsageError, match="no trace of the suite is called 'none'"):
        run(tmp_path / "out.json", suite=suite / "suite.json", traces=suite, trace="none")
