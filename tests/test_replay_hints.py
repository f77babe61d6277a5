"""Hints in replay: at precision 1 nearly nothing waits, budgets hold whatever is hinted, without any nothing changes; bad input is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefetcher.errors import InputError, UsageError
from prefetcher.replay.accounts import LOGS, check_limits
from prefetcher.replay.hints import HintFeed, SyntheticHints, check_hints, read_hints
from prefetcher.replay.ours import RateBlock, score_blocks
from prefetcher.replay.run import Ours, Simulation, replay_command
from prefetcher.replay.trace import Trace, read_trace

GB = 10**9
LINK = 2e9
T0 = 1.7e9


def write_log(folder: Path, rows: int, seed: int) -> Path:
    """Sparse rows of 14 models with users who each have a few; loads take 1 to 4 s."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 8, rows)
    model = (2 * user + rng.integers(0, 4, rows)) % 14
    ts = T0 + np.cumsum(rng.exponential(240.0, rows))
    table = {"ts": ts, "model": [f"m{m:02d}" for m in model], "user": [f"u{u}" for u in user]}
    pq.write_table(pa.table(table), folder / "log.parquet")
    return folder / "log.parquet"


SIZES = {f"m{i:02d}": (2 + i % 7) * GB for i in range(14)}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return read_trace(write_log(tmp_path_factory.mktemp("log"), 1200, 3), catalog=SIZES)


@pytest.fixture(scope="module")
def blocks(trace: Trace) -> list[RateBlock]:
    return list(score_blocks(trace, 0, lambda _done, _what: None))


def simulation(trace: Trace, blocks: list[RateBlock], hints: str | None = None, ratio: float = 0.3, nodes: int = 1) -> Simulation:
    told = None if hints is None else read_hints(hints, trace)
    return Simulation(trace, ratio * sum(SIZES.values()), link_bytes_per_s=LINK, blocks=blocks, hints=told, nodes=nodes)


def cold_s(run: Simulation, ours: Ours) -> float:
    return float(run.totals("ours", ours.logs)["cold_seconds"])


def test_when_every_row_is_hinted_in_time_and_no_hint_is_false_next_to_nothing_waits(trace: Trace, blocks: list[RateBlock]) -> None:
    plain, told = simulation(trace, blocks), simulation(trace, blocks, "synthetic:precision=1,lead=10,seed=1")
    without, hinted = plain.ours(), told.ours()
    assert cold_s(plain, without) > 100.0
    assert cold_s(told, hinted) < 0.05 * cold_s(plain, without)
    assert hinted.hints is not None
    assert hinted.hints.hinted.all()
    assert hinted.hints.broken == 0
    assert 0.8 * len(trace) < hinted.hints.kept <= len(trace), "a few fold"
    orders = hinted.logs.orders.to_pylist()
    assert {order["cause"] for order in orders} >= {"hint"}
    used = [order for order in orders if order["cause"] == "hint"]
    assert sum(order["outcome"] == "timely" for order in used) > 0.9 * len(used)
    held = hinted.logs.residency.to_pylist()
    assert {h["cause"] for h in held} <= {"demand", "forecast", "hint"}
    assert sum(h["cause"] == "hint" for h in held) == len(used)


@pytest.mark.parametrize("lead_s", [5.0, 0.25])
def test_nodes_are_told_how_far_hints_announce_a_model(trace: Trace, lead_s: float) -> None:
    feed = HintFeed(trace, SyntheticHints(1.0, lead_s, 1).make(trace), ["n"])
    (events,) = feed.until(trace.t1, lambda _model, _now_s: 0.001)
    late = events[events["ts"] > trace.t0 + 0.5 * (trace.t1 - trace.t0)]
    assert np.all(late["announced"] > 0.8)
    # A hint that folds into an open one counts from the first.
    assert np.all((late["lead_s"] >= 0.99 * lead_s) & (late["lead_s"] < 4.0 * lead_s + 10.0))


def test_a_row_that_no_hint_announced_is_told_after_it(trace: Trace) -> None:
    hints = SyntheticHints(1.0, 5.0, 1).make(trace)
    half = trace.t0 + 0.5 * (trace.t1 - trace.t0)
    first = int(np.searchsorted(hints.ts, half))
    feed = HintFeed(trace, replace(hints, ts=hints.ts[:first]), ["n"])
    (events,) = feed.until(trace.t1, lambda _model, _now_s: 0.001)
    last = [events[events["model"] == m][-1] for m in range(len(trace.models))]
    assert all(event["announced"] < 0.5 for event in last)
    assert not any(event["news"] for event in last)


def test_hints_are_ours_alone_and_the_shadow_is_told_nothing(trace: Trace, blocks: list[RateBlock]) -> None:
    plain, told = simulation(trace, blocks), simulation(trace, blocks, "synthetic:precision=0.5,lead=5,seed=1")
    assert all(getattr(told.rivals(["lru"])["lru"], n).equals(getattr(plain.rivals(["lru"])["lru"], n)) for n in LOGS)
    with_hints, without = told.ours(), plain.ours()
    assert all(getattr(with_hints.shadow, n).equals(getattr(without.shadow, n)) for n in LOGS)
    assert with_hints.logs.orders.num_rows != without.logs.orders.num_rows


def test_hints_that_say_nothing_change_nothing(trace: Trace, blocks: list[RateBlock], tmp_path: Path) -> None:
    """The path with hints and the one without are the same where no hint is open for a row or a prefetch."""
    pq.write_table(pa.table({"ts": [T0 - 1000.0], "model": ["m00"], "ttl_s": [1.0]}), tmp_path / "hints.parquet")
    told, plain = simulation(trace, blocks, str(tmp_path / "hints.parquet")).ours(), simulation(trace, blocks).ours()
    assert all(getattr(told.logs, n).equals(getattr(plain.logs, n)) for n in LOGS)
    assert all(getattr(told.shadow, n).equals(getattr(plain.shadow, n)) for n in LOGS)


def test_a_false_hint_is_held_for_its_own_time_and_given_up(trace: Trace, blocks: list[RateBlock], tmp_path: Path) -> None:
    quiet = int(np.argmax(np.diff(trace.ts[:600])))
    at_s = float(trace.ts[quiet]) + 60.0
    pq.write_table(pa.table({"ts": [at_s], "model": ["m13"], "ttl_s": [30.0]}), tmp_path / "hints.parquet")
    logs = simulation(trace, blocks, str(tmp_path / "hints.parquet"), ratio=2.0).ours().logs
    (order,) = [o for o in logs.orders.to_pylist() if o["cause"] == "hint"] or [None]
    if order is None:
        held = [h for h in logs.residency.to_pylist() if h["model"] == "m13" and h["start_s"] <= at_s < h["end_s"]]
        assert held, "it was there already, or it is fetched"
        return
    assert (order["issued_s"], order["model"]) == (at_s, "m13")
    assert order["outcome"] in ("useless", "timely")
    if order["outcome"] == "useless":
        assert order["end_s"] == at_s + 30.0


@pytest.mark.parametrize("nodes", [1, 3])
@given(
    precision=st.floats(0.05, 1.0), lead=st.floats(0.0, 600.0), ttl=st.floats(0.5, 3600.0), seed=st.integers(0, 99),
    ratio=st.floats(0.05, 1.2),
)  # fmt: skip
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_hint_takes_more_than_there_is(
    trace: Trace, blocks: list[RateBlock], nodes: int, precision: float, lead: float, ttl: float, seed: int, ratio: float
) -> None:
    run = simulation(trace, blocks, f"synthetic:precision={precision},lead={lead},ttl={ttl},seed={seed}", ratio, nodes)
    ours = run.ours()
    assert check_limits(ours.logs.residency, ours.logs.transfers, int(run.capacity_bytes), LINK) == []
    found = ours.logs.waits
    assert found.num_rows == len(trace)
    assert min(found["wait_s"].to_pylist()) >= 0.0
    assert ours.hints is not None
    assert ours.hints.kept + ours.hints.broken <= len(SyntheticHints(precision, lead, seed, ttl).make(trace))


def test_synthetic_hints_are_as_precise_as_they_are_asked_to_be(trace: Trace) -> None:
    hints = SyntheticHints(0.7, 5.0, 1).make(trace)
    assert len(hints) == len(trace) + round(len(trace) * 3 / 7)
    assert np.all(np.diff(hints.ts) >= 0)
    named = {(round(float(t), 6), int(m)) for t, m in zip(hints.ts + 5.0, hints.model, strict=True)}
    assert {(round(float(t), 6), int(m)) for t, m in zip(trace.ts, trace.model, strict=True)} <= named
    again, other = SyntheticHints(0.7, 5.0, 1).make(trace), SyntheticHints(0.7, 5.0, 2).make(trace)
    assert np.array_equal(again.model, hints.model)
    assert not np.array_equal(other.model, hints.model)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("synthetic:precision=0", "precision must be above 0"),
        ("synthetic:precision=1.5", "precision must be above 0 to 1"),
        ("synthetic:lead=x", "lead is 'x', which is no number"),
        ("synthetic:lead=nan", "lead must be"),
        ("synthetic:leads=5", "'leads=5' is no setting"),
        ("synthetic:0.7", "'0.7' is no setting"),
    ],
)
def test_a_bad_wish_for_synthetic_hints_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_hints(text)


def test_more_hints_than_fit_are_refused_before_they_are_made(trace: Trace) -> None:
    with pytest.raises(UsageError, match="give a higher precision, or a shorter log"):
        read_hints("synthetic:precision=1e-9", trace)


def test_a_log_of_hints_is_read_with_what_it_has_and_what_is_wrong_is_counted(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "hints.jsonl"
    lines = [
        {"ts": T0 + 9.0, "model": "m01", "in_s": 3, "ttl_s": 60, "source": "page", "user": "u1", "kind": "intent", "surface": "chat"},
        {"ts": T0 + 1.0, "model": "m02"},
        {"ts": T0 + 2.0, "model": "other"},
        {"ts": "never", "model": "m01"},
        {"ts": T0 + 2.0, "model": "m01", "ttl_s": -1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    hints = read_hints(str(path), trace)
    assert [trace.models[m] for m in hints.model] == ["m02", "m01"]
    last = hints.hint(1, trace.models)
    assert (last.source, last.user, last.kind, last.surface) == ("page", "u1", "intent", "chat")
    assert (last.at_s, last.until_s) == (T0 + 12.0, T0 + 72.0)
    assert sorted(hints.problems.values()) == [1, 1, 1]
    with pytest.raises(InputError, match="under --strict"):
        read_hints(str(path), trace, strict=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "needs the columns ts and model"),
        (f"ts,model\n{T0},nobody\n", "no usable hint"),
        ("", "is empty"),
    ],
)
def test_what_is_no_log_of_hints_is_refused(trace: Trace, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "hints.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        read_hints(str(path), trace)
    with pytest.raises(InputError, match="there is no such log of hints"):
        read_hints(str(tmp_path / "none.csv"), trace)


def test_the_command_says_what_hints_were_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path, 300, 5)
    (tmp_path / "sizes.json").write_text(json.dumps(SIZES))
    shared = {"log": log, "catalog": tmp_path / "sizes.json", "capacity_ratio": 0.3, "policy": "lru,ours"}
    replay_command(out=tmp_path / "out", hints="synthetic:precision=0.7,lead=5,seed=1", **shared)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    told, ours = summary["input"]["hints"], summary["policies"][1]
    assert told["hints"] == 300 + round(300 * 3 / 7)
    assert 250 < told["kept"] < told["hints"]
    assert ours["hinted_requests"] == ours["requests"]
    assert ours["hinted_cold_seconds"] < ours["hinted_cold_seconds_without"]
    said = capsys.readouterr().out
    assert "hints (synthetic, precision 0.7, 5 s ahead" in said
    assert f"{told['kept']:,} were kept" in said
    replay_command(out=tmp_path / "plain", **shared)
    summary = json.loads((tmp_path / "plain" / "summary.json").read_text())
    assert "hints" not in summary["input"]
    assert not [key for key in summary["policies"][1] if "hint" in key]
    with pytest.raises(UsageError, match="--hints are told to ours alone"):
        replay_command(out=tmp_path / "out", hints="synthetic", **{**shared, "policy": "lru"})


def test_hints_that_are_settled_are_counted_once(trace: Trace) -> None:
    feed = HintFeed(trace, SyntheticHints(0.5, 5.0, 1).make(trace), ["n"])
    events = [feed.until(float(t), lambda model, now_s: float("nan"))[0] for t in np.linspace(trace.t0, trace.t1, 7)]
    whole = HintFeed(trace, SyntheticHints(0.5, 5.0, 1).make(trace), ["n"])
    (at_once,) = whole.until(trace.t1, lambda model, now_s: float("nan"))
    assert np.array_equal(np.concatenate(events), at_once), "in pieces or at once"
    assert np.all(np.diff(at_once["ts"]) >= 0)
    assert feed.hinted.all()
    assert (feed.kept, feed.broken) == (whole.kept, whole.broken)
    assert feed.broken > 0.5 * feed.kept
