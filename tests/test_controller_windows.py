"""Windows on the live side: what plans and shadow caches make of them, and the whole way on a running `prefetcher up`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from up_kit import COMMAND, running
from waiting import eventually

from prefetcher.api.client import get
from prefetcher.controller.planning import Given, Planned, Worth, make_plan
from prefetcher.controller.records import KnownWeights, Memory, NodeReport
from prefetcher.controller.windows import WindowEvent, WindowShelf
from prefetcher.core.experts import EXPERTS, VARIANT_OF_HORIZON, VARIANTS
from prefetcher.core.hints import Expected
from prefetcher.core.shadow_caches import Outlook, ShadowCaches
from prefetcher.core.types import Arm, Cause, DecisionId, Window
from prefetcher.core.windows import DEFAULT_WINDOW, NO_LEAD_LIMIT_S, BookEntry, Segment, WindowBook, WindowTable
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NOW_S, GB = 10_000.0, 10**9
T0 = 1_767_225_600.0
RATE, LOAD_S = 0.01, 2.0


def table(*windows: Window) -> WindowTable:
    return WindowTable(*np.array([(w.lead_s, w.horizon_s, w.hold_s) for w in windows]).T)


def plan_of(
    *windows: Window | None,
    hinted_per_s: float = 0.0,
    announced: tuple[float, float] = (0.0, 0.0),
    expected: Mapping[str, Expected] | None = None,
) -> Planned:
    """A plan over as many models, each used in 1/RATE s; None: no windows at all."""
    count = len(windows)
    known = tuple(KnownWeights(f"m{k}", "1", GB, LOAD_S) for k in range(count))
    report = NodeReport("n", NOW_S, Memory(10 * GB, 0), 1e9, known=known)
    rate, index = np.full(count, RATE), np.full(count, 1e-10)
    outlook = Outlook("hazard-prefetch", EXPERTS["hazard-prefetch"], rate, rate, rate, (("hazard", 1.0),))
    worth = Worth(index, index, rate, np.full(count, hinted_per_s), rate, np.zeros(count, np.bool_))
    ids = iter(range(100))
    given = Given(
        NOW_S, 1, 1, 0.0, 600.0, 60.0, Arm.TREATED, True, frozenset(), {}, lambda _model: 0.0, lambda: DecisionId(f"o{next(ids)}"),
        windows=None if None in windows else table(*(w for w in windows if w is not None)), announced=lambda _model: announced,
        expected=expected or {},
    )  # fmt: skip
    return make_plan(report, outlook, worth, given)


def holds(planned: Planned) -> dict[str, float]:
    return {str(order.key.model): order.hold_s for order, _ in planned.new}


def test_an_order_is_held_as_its_model_s_window_says() -> None:
    found = holds(plan_of(replace(DEFAULT_WINDOW, hold_s=45.0), DEFAULT_WINDOW, replace(DEFAULT_WINDOW, hold_s=3600.0)))
    assert found == {"m0": 45.0, "m1": 600.0, "m2": 3600.0}


def test_a_lead_holds_prefetches_back_until_the_use_is_that_near() -> None:
    """The use is 100 s away and the load takes 2 s."""
    early, soon = replace(DEFAULT_WINDOW, lead_s=97.9), replace(DEFAULT_WINDOW, lead_s=98.1)
    planned = plan_of(early, soon, DEFAULT_WINDOW)
    assert set(holds(planned)) == {"m1", "m2"}
    assert planned.skipped == {"too_early": 1}


def test_what_is_hinted_has_a_time_of_its_own() -> None:
    assert set(holds(plan_of(replace(DEFAULT_WINDOW, lead_s=0.0), hinted_per_s=RATE / 2.0))) == {"m0"}


def test_what_hints_announce_in_time_is_left_to_them() -> None:
    """The load takes 2 s."""
    left = plan_of(None, announced=(0.95, 5.0))
    assert (holds(left), left.skipped) == ({}, {"left_to_hints": 1})
    for announced in ((0.95, 0.2), (0.1, 5.0)):
        assert set(holds(plan_of(None, announced=announced))) == {"m0"}
    hint = Expected(0.6, NOW_S + 3.0, NOW_S + 60.0, RATE / 2.0, NOW_S + 10.0, "page")
    ((order, score),) = plan_of(None, announced=(0.95, 5.0), hinted_per_s=RATE / 2.0, expected={"m0": hint}).new
    assert order.cause is Cause.HINT, "a weak hint is all that is left"
    ((_, strong),) = plan_of(None, hinted_per_s=RATE, expected={"m0": hint}).new
    assert score == pytest.approx(strong / 2.0)


def test_the_default_window_decides_as_no_window_does() -> None:
    one, other = plan_of(DEFAULT_WINDOW, DEFAULT_WINDOW), plan_of(None, None)
    assert (one.plan, one.skipped) == (other.plan, other.skipped)


# --- shadow caches ---


def fed(bound: WindowTable | None, *, snapshot: bool = False) -> ShadowCaches:
    """Two models with room for one, used in turn every half hour, and rates that say so; a day of it."""
    of = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600.0, tick_s=60.0, start_s=T0)
    of.serve(np.array([0, 1]), np.array([10e9, 10e9]), np.array([3.0, 3.0]), 15e9)
    numbers = np.array([0, 1])
    if bound is not None:
        of.bound(numbers, bound)
    for hour in range(12):
        from_s = T0 + hour * 3600.0
        ts = from_s + np.array([100.0, 1900.0])
        ticks = from_s + 60.0 * np.arange(1.0, 61.0)
        at_tick = np.full((VARIANTS, 60, 2), 1.0 / 3600.0, np.float32)
        of.advance(ts, numbers, np.full((VARIANTS, 2), 1.0 / 3600.0, np.float32), ticks, at_tick, from_s + 3600.0)
        if snapshot and hour == 5:
            arrays, facts = of.snapshot()
            of = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600.0, tick_s=60.0, start_s=T0)
            of.restore(arrays, json.loads(json.dumps(facts)))
            of.bound(numbers, bound)
    return of


def test_default_windows_change_nothing_in_shadow_caches() -> None:
    plain, bound = fed(None), fed(table(DEFAULT_WINDOW, DEFAULT_WINDOW))
    assert bound.costs_s == plain.costs_s
    assert bound.shadow_wait_s == plain.shadow_wait_s
    np.testing.assert_array_equal(bound.outlook(T0 + 43_200.0).keep_per_s, plain.outlook(T0 + 43_200.0).keep_per_s)


def test_windows_survive_a_restart_between_rows() -> None:
    windows = table(Window(60.0, 300.0, 120.0), DEFAULT_WINDOW)
    assert fed(windows, snapshot=True).costs_s == fed(windows).costs_s


def test_each_model_is_ranked_by_the_forecast_over_its_own_horizon() -> None:
    of = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600.0, tick_s=60.0, start_s=T0)
    numbers, ticks = np.array([0, 1, 2]), T0 + 60.0 * np.arange(1.0, 3.0)
    of.serve(numbers, np.full(3, 1e9), np.full(3, 1.0), 15e9)
    # The deciding expert at the start, whatever the Hedge would say.
    of._hedge.live = list(EXPERTS).index("hazard-prefetch")
    rates = 1e-4 * np.arange(1, VARIANTS + 1, dtype=np.float32)[:, None]
    at_tick, after_row = np.repeat(rates[:, :, None], 2, axis=1) * np.ones(3, np.float32), np.repeat(rates, 3, axis=1)
    of.advance(np.full(3, T0 + 1.0), numbers, after_row, ticks, at_tick.astype(np.float32), T0 + 121.0)
    plain = of.outlook(T0 + 122.0).prefetch_per_s
    assert plain is not None
    of.bound(np.array([0, 2]), table(Window(NO_LEAD_LIMIT_S, 120.0, 600.0), Window(NO_LEAD_LIMIT_S, 3600.0, 600.0)))
    bound = of.outlook(T0 + 122.0).prefetch_per_s
    assert bound is not None
    own = EXPERTS["hazard-prefetch"].prefetch_variant
    assert plain == pytest.approx([float(rates[own, 0])] * 3)
    expected = [float(rates[VARIANT_OF_HORIZON[horizon], 0]) if horizon else float(rates[own, 0]) for horizon in (120.0, 0.0, 3600.0)]
    assert bound == pytest.approx(expected)
    of.bound(None, None)
    np.testing.assert_array_equal(of.outlook(T0 + 122.0).prefetch_per_s, plain)


def test_what_a_shadow_waits_after_the_wash_out_is_kept_by_hour() -> None:
    of = fed(None)
    hours = [int(T0 // 3600.0) + hour for hour in range(12)]
    assert sorted(of.shadow_hours) == sorted(of.shadow_measured) == hours
    for hour in hours:
        # The row at 100 s is in the wash-out, the one at 1900 s is not.
        assert 0.0 <= of.shadow_measured[hour] <= of.shadow_hours[hour] + 1e-9
    assert sum(of.shadow_hours.values()) == pytest.approx(of.shadow_wait_s)
    first = hours[0]
    assert of.shadow_measured[first] == pytest.approx(3.0)
    assert of.shadow_hours[first] == pytest.approx(6.0)


# --- on a running node ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "store")
    made.start()
    yield made
    made.stop()


def test_windows_on_a_running_node_from_the_command_line_to_the_plan(server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    with running(tmp_path / "up", PREFETCHER_STATE__URL=server.url) as up:

        def cli(*args: str) -> str:
            done = subprocess.run([*COMMAND, *args, "--url", up.url], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "at any time, the expert's horizon, hold 10 min" in cli("windows", "list")
        assert "nothing has changed windows yet" in cli("windows", "history")
        # With an hour of history there is nothing to tune by, and the job says so.
        eventually(lambda: any(job["name"] == "tune-windows" for job in get(up.url, "/v1/jobs")))
        assert "the windows stay" in cli("jobs", "run", "tune-windows")
        assert "no change of windows is being watched" in cli("jobs", "run", "watch-windows")
        # As the tuner writes it.
        state = RedisState(server.url)
        shelf = WindowShelf(state)
        small = Segment("small", (("bytes", 0.0, 1e6),))
        event = WindowEvent(1.0, "segments", "tune-windows", 0, why="1 segment")
        shelf.change(lambda _, __: (WindowBook((BookEntry(small),)), [event], None))
        assert "hold 45 s" in cli("windows", "pin", "small", "--hold", "45s")
        assert "pinned" in cli("windows", "list")
        found = get(up.url, "/v1/windows")
        assert (found["version"], found["segments"][0]["window"]["hold_s"], found["segments"][0]["pinned"]) == (2, 45.0, True)
        assert "unpinned" in cli("windows", "unpin", "small")
        assert "now version 4" in cli("windows", "rollback")
        assert [e["act"] for e in get(up.url, "/v1/windows")["events"]] == ["rolled_back", "unpinned", "pinned", "segments"]
        effect = get(up.url, "/v1/effect")
        assert (effect["running"], effect["low"]) == (False, None)
        # The controller says why none runs once it has looked.
        eventually(lambda: "control_ratio is 0" in get(up.url, "/v1/effect")["experiment"])
        assert get(up.url, "/v1/report?since=0")["effect"]["basis"] in ("nothing", "shadow")
        state.close()
