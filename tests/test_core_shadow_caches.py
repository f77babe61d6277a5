"""The controller's shadow caches decide what replay decides, whatever the pieces in which rows and time arrive, and survive a restart."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefetcher.controller.learner import Learner
from prefetcher.core.experts import EXPERTS, VARIANTS
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.replay.engine import split_by_node
from prefetcher.replay.ours import LIVE, SHADOW, NodeRun, RateBlock, score_blocks
from prefetcher.replay.trace import Trace, read_trace

T0 = 1_767_225_600.0
MODELS = 9
LINK = 2.0e7
PRICE, HOLD_S = 0.5, 600.0
Piece = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two days: a beat, a daily peak, two that follow each other, and a tail; the first row at a whole hour."""
    rng = np.random.default_rng(3)
    found: list[tuple[float, str]] = [(0.0, "m0")]
    found += [(t + rng.normal(0, 20), "m0") for t in np.arange(900, 172_000, 1800)]
    for day in (0, 86_400):
        found += [(day + t, "m1") for t in rng.normal(40_000, 9000, 300)]
    for start in rng.uniform(0, 170_000, 60):
        found += [(start, "m2"), (start + 60 + rng.exponential(90), "m3")]
    found += [(t, f"m{rng.integers(4, MODELS)}") for t in rng.uniform(0, 172_000, 300)]
    found = sorted((T0 + t, m) for t, m in found if 0.0 <= t < 172_800.0)
    folder = tmp_path_factory.mktemp("trace")
    pq.write_table(pa.table({"ts": [t for t, _ in found], "model": [m for _, m in found]}), folder / "log.parquet")
    return read_trace(folder / "log.parquet", catalog={f"m{i}": 10**9 * (1 + i % 4) for i in range(MODELS)})


def caches() -> ShadowCaches:
    return ShadowCaches(price_s_per_gb_h=PRICE, hold_s=HOLD_S, tick_s=60.0, start_s=T0)


def serve(shadows: ShadowCaches, trace: Trace, capacity: float) -> None:
    size = trace.bytes_.astype(float)
    shadows.serve(np.arange(MODELS), size, size / LINK, capacity)


@pytest.fixture(scope="module")
def rates(trace: Trace) -> RateBlock:
    """Of the whole log at once."""
    (block,) = score_blocks(trace, 0, lambda done, what: None, periods=48)
    return block


@pytest.fixture(scope="module")
def replayed(trace: Trace, rates: RateBlock) -> NodeRun:
    part = split_by_node(trace, 1, LINK, None)[0]
    run = NodeRun(part.world, 0.4 * float(trace.bytes_.sum()), PRICE, HOLD_S)
    run.take(rates, part.rows)
    run.close()
    return run


def pieces(trace: Trace, rates: RateBlock, every: int) -> list[Piece]:
    out, tick = [], 0
    for first in range(0, len(trace), every):
        last = min(len(trace), first + every)
        until_s = float(trace.ts[last - 1])
        ticks = int((until_s - T0) // 60.0) + 1
        out.append(
            (
                trace.ts[first:last],
                trace.model[first:last].astype(np.int64),
                rates.after_row[:, first:last],
                T0 + 60.0 * np.arange(tick, ticks),
                rates.at_tick[:, tick:ticks],
                until_s,
            )
        )
        tick = ticks
    return out


@pytest.mark.parametrize("every", [1, 17, 10_000])
def test_as_replay(trace: Trace, rates: RateBlock, replayed: NodeRun, every: int) -> None:
    capacity = 0.4 * float(trace.bytes_.sum())
    log, chosen = replayed.log, replayed.chosen
    assert len(set(chosen)) > 1, "the log must make the Hedge choose"
    shadows = caches()
    serve(shadows, trace, capacity)
    live = []
    for piece in pieces(trace, rates, every):
        live.append((piece[5], shadows.expert))
        shadows.advance(*piece)
    names = list(EXPERTS)
    for (before_s, _), (_, expert) in itertools.pairwise(live):
        assert expert == names[chosen[int((before_s - T0) // 3600.0)]]
    assert shadows.expert == names[chosen[-1]]
    waits = log.wait_s[log.slot[SHADOW], : len(trace)]
    over = (trace.ts + waits) <= T0 + 3600.0 * ((float(trace.ts[-1]) - T0) // 3600.0)
    assert shadows.shadow_wait_s == pytest.approx(float(waits[over].sum()), rel=1e-9)
    assert log.slot[LIVE] >= 0


def test_restored_caches_go_on_as_if_nothing_had_happened(trace: Trace, rates: RateBlock) -> None:
    straight, first = caches(), caches()
    parts = pieces(trace, rates, 101)
    for shadows in (straight, first):
        serve(shadows, trace, 8e9)
        for piece in parts[:5]:
            shadows.advance(*piece)
    second = ShadowCaches(price_s_per_gb_h=PRICE, hold_s=HOLD_S, tick_s=60.0, start_s=T0 + 9e6)
    second.restore(*first.snapshot())
    for shadows in (straight, second):
        for piece in parts[5:]:
            shadows.advance(*piece)
    (one, facts_1), (two, facts_2) = straight.snapshot(), second.snapshot()
    assert facts_1 == facts_2
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    now_s = float(trace.ts[-1]) + 30.0
    np.testing.assert_array_equal(straight.outlook(now_s).keep_per_s, second.outlook(now_s).keep_per_s)


def test_what_is_no_snapshot_of_them() -> None:
    arrays, facts = caches().snapshot()
    with pytest.raises(ValueError, match="shadow caches of"):
        caches().restore(arrays, facts | {"experts": ["another"]})
    with pytest.raises(ValueError, match="shape"):
        caches().restore(arrays | {"cache": arrays["cache"][:-8]}, facts)


def test_models_appear_change_size_and_leave() -> None:
    """Every cache's bytes are those of what it holds, and never above its memory."""
    rng = np.random.default_rng(1)
    shadows, learner = ShadowCaches(price_s_per_gb_h=0.0, hold_s=300.0, tick_s=60.0, start_s=T0), Learner(lambda: None)
    known = 2
    for step in range(60):
        known = min(MODELS, known + (step % 7 == 0))
        rows = [RequestSeen(T0 + 60.0 * step + float(t), ModelName(f"m{rng.integers(0, known)}")) for t in np.sort(rng.uniform(0, 60, 9))]
        taken = learner.take(rows, {}, T0 + 60.0 * (step + 1))
        numbers = np.array([n for n in range(len(learner.names)) if rng.random() < 0.9], np.int64)
        sizes = np.where(rng.random(len(numbers)) < 0.1, 2e9, 1e9)
        shadows.serve(numbers, sizes, sizes / 1e9, 4e9)
        shadows.advance(taken.ts, taken.model, taken.after_row, taken.ticks, taken.at_tick, T0 + 60.0 * (step + 1))
        weights, cache, size = shadows._caches.weights, shadows._caches.cache, shadows._size
        for e in range(len(EXPERTS) + 1):
            uncached = cache["moving"][e] if cache["link"][e] == 2 else -1
            held = [m for m in range(len(size)) if weights["status"][e, m] in (2, 3, 4, 5) and m != uncached]
            assert cache["used"][e] == pytest.approx(size[held].sum())
    outlook = shadows.outlook(T0 + 3600.0)
    assert len(outlook.keep_per_s) == len(learner.names)
    assert (outlook.keep_per_s > 0.0).any()


def test_a_long_silence_costs_little_and_loses_the_guesses() -> None:
    shadows = caches()
    shadows.serve(np.array([0]), np.array([1e9]), np.array([1.0]), 4e9)
    row = (np.array([T0 + 1.0]), np.array([0]), np.full((VARIANTS, 1), 0.01, np.float32))
    shadows.advance(*row, np.zeros(0), np.zeros((VARIANTS, 0, 1), np.float32), T0 + 30.0)
    assert shadows.shadow_holds().tolist() == [True]
    shadows.advance(
        np.zeros(0), np.zeros(0, np.int64), np.zeros((VARIANTS, 0), np.float32),
        np.array([T0 + 3e7]), np.zeros((VARIANTS, 1, 1), np.float32), T0 + 3e7,
    )  # fmt: skip
    assert shadows.shadow_holds().tolist() == [False], "its price ended it"


def test_a_model_whose_requests_are_to_come_to_a_node_that_saw_none_is_likely_there_by_the_forecast() -> None:
    shadows = caches()
    shadows.serve(np.arange(3), np.full(3, 1e9), np.full(3, 50.0), 4e9)
    # Only model 0 was asked for here; the forecast speaks of models 0 and 1, and of 2 nobody knows anything.
    rate = np.array([0.01, 0.02, np.nan], np.float32)
    ticks = T0 + 60.0 * np.arange(1, 3)
    at_tick = np.broadcast_to(rate, (VARIANTS, 2, 3)).copy()
    shadows.advance(np.array([T0 + 1.0]), np.array([0]), np.full((VARIANTS, 1), 0.01, np.float32), ticks, at_tick, T0 + 130.0)
    alone = shadows.outlook(T0 + 130.0)
    assert alone.prefetch_per_s is not None
    assert alone.prefetch_per_s[1] == alone.keep_per_s[1] == 0.0
    sent = shadows.outlook(T0 + 130.0, np.array([True, True, True]))
    assert sent.prefetch_per_s is not None
    assert sent.prefetch_per_s[1] == pytest.approx(0.02)
    assert sent.keep_per_s[1] == pytest.approx(0.02)
    assert sent.prefetch_per_s[0] == alone.prefetch_per_s[0] > 0.0
    assert sent.prefetch_per_s[2] == 0.0
    # Of fewer models than there are, when more came since.
    assert shadows.outlook(T0 + 130.0, np.array([True])).keep_per_s[1] == 0.0
