"""Windows tuned over a log: the walk finds what is best for two kinds of models, the command says so, and a changed log is seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.bench.regime import WITHIN, changed_log, days_until_within
from prefetcher.bench.windows import FIXED, STARTS
from prefetcher.core.experts import HORIZONS, VARIANTS
from prefetcher.core.tuner import TunerSettings
from prefetcher.core.types import Window
from prefetcher.core.windows import DEFAULT_WINDOW, NO_LEAD_LIMIT_S, OWN_HORIZON_S, WindowBook
from prefetcher.errors import InputError, UsageError
from prefetcher.replay.engine import split_by_node
from prefetcher.replay.ours import RateBlock
from prefetcher.replay.trace import Trace, read_trace
from prefetcher.tuning.command import sampled, tune, tune_command
from prefetcher.tuning.walk import TuningWalk

GB = 10**9
HOUR, DAY = 3600.0, 86_400.0
T0 = 1_700_006_400.0  # a whole hour
NEVER = Window(0.0, OWN_HORIZON_S, 60.0)
EARLY = Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 1200.0)


def two_kinds(folder: Path, days: int = 6) -> Trace:
    """Six small models on an hourly timer, and six large ones at random a few times a day, with memory for a third of them."""
    rng = np.random.default_rng(5)
    rows = [(T0 + 300.0 * m + HOUR * k + 37.0, f"beat{m}") for m in range(6) for k in range(24 * days - 1)]
    rows += [(float(t), f"rare{m}") for m in range(6) for t in rng.uniform(T0, T0 + days * DAY, 3 * days)]
    rows += [(T0, "beat0"), (T0 + days * DAY, "beat0")]
    rows.sort()
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"ts": [t for t, _ in rows], "model": [m for _, m in rows]}), folder / "log.parquet")
    sizes = [{"model": f"beat{m}", "bytes": 8 * GB} for m in range(6)] + [{"model": f"rare{m}", "bytes": 60 * GB} for m in range(6)]
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return read_trace(folder / "log.parquet", catalog=folder / "sizes.json")


def told(trace: Trace) -> list[RateBlock]:
    """Rates that somebody knows who sees timers coming 5 min ahead, and is always wrong about the others for an hour after a use."""
    n, ticks = len(trace.models), int((trace.t1 - trace.t0) / 60.0) + 2
    beats = np.array([m.startswith("beat") for m in trace.models])
    at_tick = np.full((VARIANTS, ticks, n), 1e-6, np.float32)
    now = trace.t0 + 60.0 * np.arange(ticks)
    for m in range(n):
        mine = trace.ts[trace.model == m]
        if beats[m]:
            following = np.append(mine, np.inf)[np.searchsorted(mine, now, side="right")]
            soon = following - now
            at_tick[:, soon <= 300.0, m] = (1.0 / np.maximum(soon, 1.0))[soon <= 300.0]
        else:
            since = now - np.append(-np.inf, mine)[np.searchsorted(mine, now, side="right")]
            at_tick[:, (since > 600.0) & (since <= 4200.0), m] = 0.002
    after_row = np.full((VARIANTS, len(trace)), 1e-6, np.float32)
    blocks = []
    for k in range(int((trace.t1 - trace.t0) // HOUR) + 1):
        from_s = trace.t0 + k * HOUR
        first, last = np.searchsorted(trace.ts, (from_s, from_s + HOUR))
        # As `score_blocks` has them, whole: of slices, kernels are compiled once more.
        rates = np.ascontiguousarray(at_tick[:, 60 * k : 60 * k + 61])
        blocks.append(RateBlock(from_s, from_s + HOUR, int(first), 60 * k, rates, np.ascontiguousarray(after_row[:, first:last])))
    return blocks


def walked(trace: Trace, start: Window | WindowBook, **settings: float) -> TuningWalk:
    walk = TuningWalk(
        split_by_node(trace, 1, 3.5e9, None), 70 * GB, settings=TunerSettings(**settings), start=start, fixed=[NEVER, EARLY],
        candidates=[NEVER, EARLY],
    )  # fmt: skip
    for block in told(trace):
        walk.take(block)
    walk.close()
    return walk


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return two_kinds(tmp_path_factory.mktemp("two"))


def test_two_kinds_of_models_get_the_windows_that_suit_them(trace: Trace) -> None:
    """Timers are worth fetching early; what is fetched early of the others holds much memory for little, at a high price of memory. From
    either side, the tuner gets there, and then costs less than any window for all."""
    price = 0.2
    for start in (NEVER, EARLY):
        walk = walked(trace, start, price_s_per_gb_h=price)
        windows = {entry.segment.name: entry.window for entry in walk.in_force.entries}
        assert len(windows) == 2
        facts = walk.facts(trace.t1)
        of = walk.in_force.windows_of(facts)
        beats = np.array([m.startswith("beat") for m in trace.models])
        assert (of.lead_s[beats] == EARLY.lead_s).all(), windows
        assert (of.lead_s[~beats] == NEVER.lead_s).all(), windows
        last = walk.days[-2]
        for_all = np.concatenate([last.fixed, last.together])
        assert last.tuned[0] + price * last.tuned[1] < 0.9 * (for_all[:, 0] + price * for_all[:, 1]).min()
        assert all(d.new in (DEFAULT_WINDOW, NEVER, EARLY) for d in walk.decisions)
        for d in walk.decisions:
            assert d.new == DEFAULT_WINDOW or d.old_cost.seconds(price) > d.new_cost.seconds(price)


def test_the_same_log_gives_the_same_book(trace: Trace) -> None:
    first, second = walked(trace, EARLY), walked(trace, EARLY)
    assert first.in_force == second.in_force
    assert [d.to_json() for d in first.decisions] == [d.to_json() for d in second.decisions]
    assert all((a.tuned == b.tuned).all() for a, b in zip(first.days, second.days, strict=True))


def test_a_walk_goes_on_with_the_segments_of_its_book(trace: Trace) -> None:
    book = walked(trace, EARLY).in_force
    again = walked(trace, book)
    assert [entry.segment for entry in again.in_force.entries] == [entry.segment for entry in book.entries]
    pinned = book.changed(book.entries[0].segment.name, EARLY, 0.0, "by hand", pinned=True)
    assert walked(trace, pinned).in_force.entries[0] == pinned.entries[0]


def test_a_waste_budget_is_met_on_a_log(trace: Trace) -> None:
    free = walked(trace, EARLY, price_s_per_gb_h=0.0, certainty=0.0, hysteresis=0.0)
    wasted = free.days[3].fixed[1][2]
    assert wasted > 100.0, "fetching all early wastes"
    tight = walked(trace, EARLY, price_s_per_gb_h=0.0, waste_gb_h_per_day=wasted / 20.0)
    assert tight.days[4].tuned[2] <= wasted / 20.0


def test_nodes_share_a_book_and_their_costs_add_up(trace: Trace) -> None:
    walk = TuningWalk(split_by_node(trace, 2, 3.5e9, None), 35 * GB, fixed=[NEVER], candidates=[NEVER, EARLY])
    alone = [TuningWalk([part], 35 * GB, fixed=[NEVER], candidates=[NEVER, EARLY]) for part in split_by_node(trace, 2, 3.5e9, None)]
    for block in told(trace)[:48]:
        for one in (walk, *alone):
            one.take(block)
    assert walk.days[0].fixed[0] == pytest.approx(sum(one.days[0].fixed[0] for one in alone))


# --- the changed log ---


def test_a_changed_log_renames_half_of_the_models_and_moves_the_day(trace: Trace) -> None:
    changed, day = changed_log(trace)
    assert day == 3
    before = trace.ts < trace.t0 + 3 * DAY
    assert (changed.ts[before] == trace.ts[before]).all()
    assert (changed.ts[~before] == trace.ts[~before] + 3 * HOUR).all()
    assert (changed.model[before] == trace.model[before]).all()
    names = {trace.models[m]: changed.models[c] for m, c in zip(trace.model[~before], changed.model[~before], strict=True)}
    assert sum(a != b for a, b in names.items()) == 6
    assert all(b in (a, f"{a} renamed") for a, b in names.items())
    sizes = dict(zip(changed.models, changed.bytes_.tolist(), strict=True))
    assert all(sizes[a] == sizes[b] for a, b in names.items())
    assert (np.diff(changed.ts) >= 0).all()


def test_days_are_counted_until_it_stays_good() -> None:
    assert days_until_within(np.array([200.0, 110.0, 100.0]), np.array([100.0] * 3)) == 2
    assert days_until_within(np.array([WITHIN * 100.0, 100.0]), np.array([100.0] * 2)) == 1
    assert days_until_within(np.array([100.0, 900.0, 100.0]), np.array([100.0] * 3)) == 3, "a good day before bad ones doesn't count"
    assert days_until_within(np.array([900.0] * 3), np.array([100.0] * 3)) == 3


def test_the_fixed_windows_are_those_that_are_named() -> None:
    assert len(set(FIXED)) == 75
    assert all(start in FIXED for start in STARTS.values())
    assert len(HORIZONS) == 5


# --- the command ---


def test_tune_says_what_it_chose_and_writes_a_book(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_kinds(tmp_path, days=3)
    out = tmp_path / "out"
    tune_command(log=tmp_path / "log.parquet", catalog=tmp_path / "sizes.json", capacity_ratio=0.2, out=out, waste_budget=50.0)
    said = capsys.readouterr().out
    document = json.loads((out / "tune.json").read_text())
    book = WindowBook.from_json(json.loads((out / "windows.json").read_text()))
    assert document["book"] == book.to_json()
    assert document["sentence"] in said
    assert all(s["name"] in said and s["window"] in said for s in document["segments"])
    assert sum(s["models"] for s in document["segments"]) == 12
    for row in document["frontier"]:
        assert row["cost_s"] == pytest.approx(row["cold_seconds"] + 0.002 * row["held_gb_h"])
    page = (out / "report.html").read_text()
    assert all(segment["name"] in page for segment in document["segments"])
    assert "http://" not in page.split("<script>")[0]
    told = page.partition("What was changed, in order")[2].partition("</ul>")[0].count("<li>")
    assert told == max(1, len({(d["at_s"], tuple(d["new"].values()), d["why"]) for d in document["decisions"]}))


def test_tune_refuses_what_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "book.json").write_text('{"version": 1}')
    for given, said in (
        ({}, "give the capacity"),
        ({"host_bytes": 10**9, "waste_budget": 0.0}, "--waste-budget is the GB·h a day"),
        ({"host_bytes": 10**9, "price": -1.0}, "--price must be"),
        ({"host_bytes": 10**9, "out": tmp_path / "book.json"}, "is a file; name a folder"),
    ):
        with pytest.raises(UsageError, match=said):
            tune_command(log=tmp_path / "log.parquet", **given)
    with pytest.raises(InputError, match="is no book of windows: segments is a list"):
        tune_command(log=tmp_path / "log.parquet", host_bytes=10**9, book=tmp_path / "book.json")


def test_a_folder_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    two_kinds(tmp_path, days=2)
    (tmp_path / "file").write_text("")
    # The walk would refuse so short a log.
    with pytest.raises(OSError, match="file"):
        tune_command(log=tmp_path / "log.parquet", catalog=tmp_path / "sizes.json", host_bytes=10**9, out=tmp_path / "file" / "out")


def test_too_short_a_log_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    short = two_kinds(tmp_path, days=2)
    with pytest.raises(InputError, match=r"covers 2\.0 days; windows are tuned on 3 days or more"):
        tune(short, 70.0 * GB)


def test_of_many_models_a_sample_by_name_is_taken_with_its_share_of_the_memory(trace: Trace) -> None:
    part, share = sampled(trace, 5, 0)
    assert len(part.models) == 5
    assert share == pytest.approx(part.bytes_.sum() / trace.bytes_.sum())
    rows = [trace.models[m] in part.models for m in trace.model]
    assert [part.models[m] for m in part.model] == [trace.models[m] for m, keep in zip(trace.model, rows, strict=True) if keep]
    assert sampled(trace, 5, 0)[0].models == part.models
    assert sampled(trace, 12, 0) == (trace, 1.0)
    assert DEFAULT_WINDOW.lead_s == NO_LEAD_LIMIT_S
