"""Windows tuned over recent history, with real forecasts; pins; a bad change undone, by shadow caches and by the control group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefetcher.batch.scheduler import Run, RunEnded
from prefetcher.batch.training import rows_of_history
from prefetcher.batch.tuning import history_of, tune_windows, watch_windows
from prefetcher.controller import records
from prefetcher.controller.experiment import EXPERIMENT, Experiment, Span
from prefetcher.controller.records import KnownWeights, Memory, NodeReport
from prefetcher.controller.windows import WINDOW_FACTS, WindowEvent, WindowShelf, WindowView
from prefetcher.core.block_sums import BlockSum
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.segments import ALL_MODELS
from prefetcher.core.tuner import TunerSettings
from prefetcher.core.types import Arm, NodeName, Window
from prefetcher.core.windows import DEFAULT_WINDOW, BookEntry, Segment, WindowBook
from prefetcher.ingest.history import write_hour
from prefetcher_connectors.memory import MemoryState

DAYS = 3
NOW_S = 1_768_262_400.0
#: Minutes between the uses of each model; there is room for half of them.
BEATS = {"m0": 23, "m1": 29, "m2": 31, "m3": 37, "m4": 41, "m5": 43}
GB = 1_000_000_000
#: Fetches next to nothing.
BAD = Window(0.0, 300.0, 60.0)
SETTINGS = TunerSettings()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("history")
    hours: dict[int, dict[int, dict[str, int]]] = {}
    for model, beat in BEATS.items():
        for minute in range(int(NOW_S // 60) - DAYS * 1440, int(NOW_S // 60), beat):
            hours.setdefault(minute // 60, {}).setdefault(minute, {})[model] = 1
    for hour, minutes in hours.items():
        write_hour(folder, 0, hour, minutes)
    return folder


def report(node: str, models: Iterable[str] = BEATS, gb: int = 60) -> NodeReport:
    known = tuple(KnownWeights(model, "v", 20 * GB, 20 / 3.5) for model in models)
    return NodeReport(node, NOW_S, Memory(gb * GB, 0), 3.5e9, known=known)


def store(*nodes: str, windows: WindowBook | None = None) -> tuple[MemoryState, WindowShelf]:
    state = MemoryState()
    for node in nodes:
        state.write({records.node_key(NodeName(node), "report"): records.encode(report(node))})
        state.see(records.NODES, node, NOW_S)
    shelf = WindowShelf(state)
    if windows is not None:
        shelf.change(lambda _, __: (windows, [], None))
    return state, shelf


def run() -> Run:
    return Run(1, NOW_S, lambda items: True)


def book(window: Window = DEFAULT_WINDOW, pinned: bool = False) -> WindowBook:
    return WindowBook((BookEntry(ALL_MODELS, window, pinned=pinned),))


def changed_at(shelf: WindowShelf, at_s: float, window: Window = BAD) -> None:
    """The tuner changed a window then, and it has been watched since."""
    event = WindowEvent(at_s, "tuned", "tune-windows", 0, ALL_MODELS.name)
    shelf.change(lambda old, _: (old.changed(ALL_MODELS.name, window, at_s, "looked good"), [event], at_s))


# --- history ---


def test_history_is_served_as_nodes_would_with_facts_of_every_model(history: Path) -> None:
    rows = list(rows_of_history(history, 0.0))
    found = history_of(rows, [report("a"), report("b")])
    assert found is not None
    assert found.sampled == 1.0
    assert sum(len(part.rows) for part in found.parts) == len(found.trace) == sum(DAYS * 1440 // beat + 1 for beat in BEATS.values())
    assert found.capacity_bytes == 60 * GB
    rate, regularity, hinted = found.facts["m0"]
    assert rate == pytest.approx(1440 / 23, rel=0.02)
    assert (regularity, hinted) == (1.0, 0.0)


def test_of_many_models_the_same_sample_is_taken_with_its_share_of_memory(history: Path) -> None:
    rows = list(rows_of_history(history, 0.0))
    found, again = (history_of(rows, [report("a")], most_models=3) for _ in range(2))
    assert found is not None
    assert again is not None
    assert found.trace.models == again.trace.models
    assert len(found.trace.models) == 3
    assert found.sampled == 0.5
    assert found.capacity_bytes == pytest.approx(30 * GB)
    assert len(found.facts) == len(BEATS)


def test_models_that_no_node_knows_and_short_history_are_no_ground_for_tuning(history: Path) -> None:
    rows = list(rows_of_history(history, 0.0))
    assert history_of(rows, []) is None
    assert history_of(rows, [report("a", models=["other"])]) is None
    assert history_of(list(rows_of_history(history, NOW_S - 86_400.0)), [report("a")]) is None
    some = history_of(rows, [report("a", models=["m0", "m1"])])
    assert some is not None
    assert some.trace.models == ["m0", "m1"]


def test_with_too_little_history_windows_stay_and_that_is_said(tmp_path: Path) -> None:
    state, shelf = store("a")
    assert "the windows stay" in tune_windows(run(), state, tmp_path, SETTINGS, NOW_S).said
    assert shelf.read()[0].version == 0


# --- tuning ---


def test_a_bad_window_is_changed_with_its_evidence(history: Path) -> None:
    state, shelf = store("a", windows=book(BAD))
    did = tune_windows(run(), state, history, SETTINGS, NOW_S)
    after, record = shelf.read()
    (event,) = shelf.events()
    assert after.version == 2
    assert after.entries[0].window != BAD
    assert record.watched_from_s == NOW_S
    assert (event.act, event.by, event.segment) == ("tuned", "tune-windows", ALL_MODELS.name)
    assert event.why in did.said
    evidence = event.evidence
    assert evidence is not None
    assert evidence["rows"] == did.rows > 500
    assert NOW_S - 3 * 86_400 <= evidence["from_s"] < evidence["until_s"] < NOW_S
    costs = evidence["costs"][ALL_MODELS.name]
    total = {(c["lead_s"], c["horizon_s"], c["hold_s"]): c["wait_s"] + SETTINGS.price_s_per_gb_h * c["held_gb_h"] for c in costs}
    window = after.entries[0].window
    assert total[window.lead_s, window.horizon_s, window.hold_s] < total[BAD.lead_s, BAD.horizon_s, BAD.hold_s]
    # Controllers sort models by the same facts.
    view = WindowView(state)
    view.look()
    assert view.facts([("m0", 2e10)]).regularity.tolist() == [1.0]


def test_a_pinned_segment_is_left_alone(history: Path) -> None:
    state, shelf = store("a", windows=book(BAD, pinned=True))
    tune_windows(run(), state, history, SETTINGS, NOW_S)
    assert shelf.read()[0].entries[0].window == BAD
    assert shelf.events() == []


def test_a_run_that_is_to_stop_changes_nothing(history: Path) -> None:
    state, shelf = store("a", windows=book(BAD))
    stopped = run()
    stopped.stop.set()
    with pytest.raises(RunEnded):
        tune_windows(stopped, state, history, SETTINGS, NOW_S)
    assert shelf.read()[0].version == 1
    assert state.read(WINDOW_FACTS) is None


# --- watching ---


def test_a_bad_change_is_undone_by_what_the_windows_before_would_have_cost(history: Path) -> None:
    state, shelf = store("a", windows=book())
    changed_at(shelf, NOW_S - 86_400.0)
    did = watch_windows(run(), state, history, SETTINGS, NOW_S)
    after, record = shelf.read()
    event = shelf.events()[0]
    assert "more than the windows before would have" in did.said
    assert (after.entries[0].window, after.version, record.watched_from_s) == (DEFAULT_WINDOW, 3, None)
    assert (event.act, event.by, event.segment) == ("undone", "watch-windows", ALL_MODELS.name)
    assert event.evidence is not None
    assert event.evidence["by"] == "shadow"
    assert event.evidence["hours"] >= 12
    assert event.evidence["gained_s"] < -event.evidence["chance_s"] < 0.0
    # Nothing is changed again at once.
    assert "a change was undone lately" in tune_windows(run(), state, history, SETTINGS, NOW_S + 3600.0).said
    assert "no change of windows" in watch_windows(run(), state, history, SETTINGS, NOW_S + 3600.0).said


def test_a_change_that_is_no_worse_stands_and_is_watched_no_more_after_a_week(history: Path) -> None:
    state, shelf = store("a", windows=book())
    # An hour longer is the same here: prefetches are used within minutes.
    changed_at(shelf, NOW_S - 86_400.0, replace(DEFAULT_WINDOW, hold_s=620.0))
    assert "the change stands" in watch_windows(run(), state, history, SETTINGS, NOW_S).said
    assert shelf.read()[1].watched_from_s == NOW_S - 86_400.0
    assert "watched no more" in watch_windows(run(), state, history, SETTINGS, NOW_S + 6.5 * 86_400.0).said
    assert shelf.read()[1].watched_from_s is None
    assert shelf.read()[0].version == 2


def test_a_young_change_is_left_alone(tmp_path: Path) -> None:
    state, shelf = store("a", windows=book())
    changed_at(shelf, NOW_S - 3600.0)
    assert "too young" in watch_windows(run(), state, tmp_path, SETTINGS, NOW_S).said


@pytest.mark.parametrize("bad", [True, False])
def test_the_control_group_says_whether_a_change_was_bad(tmp_path: Path, bad: bool) -> None:
    """Eight nodes, six days before and six after: prefetching saved 40 %; since the change it costs 30 % more than none, or it does not."""
    names = [f"n{k}" for k in range(8)]
    state, shelf = store(*names, windows=book())
    since_s = NOW_S - 6 * 86_400.0
    changed_at(shelf, since_s)
    settings = HoldoutSettings(share=0.1)
    first = int((NOW_S - 12 * 86_400.0) // 3600.0)
    rng = np.random.default_rng(1)
    for name in names:
        blocks, waited = [], []
        for number in range(first, int(NOW_S // 3600.0) + 2):
            control = arm_of(NodeName(name), number * 3600.0, settings)[0] is Arm.CONTROL
            without = float(rng.lognormal(4.0, 0.5))
            factor = 1.3 if bad and number * 3600.0 >= since_s else 0.6
            blocks.append(BlockSum(number, control, 100, without * (1.0 if control else factor), 5, 3000.0))
            waited.append((number, without * float(rng.lognormal(0.0, 0.2))))
        state.write({records.node_key(NodeName(name), "blocks"): records.encode(blocks)})
        state.append(records.node_key(NodeName(name), "shadow"), [records.encode(each) for each in waited], 2_000)
    state.write({EXPERIMENT: records.encode(Experiment(NOW_S, "", 8, 4, (Span(first * 3600.0, 0.1, 0),)))})
    did = watch_windows(run(), state, tmp_path, SETTINGS, NOW_S)
    after, _ = shelf.read()
    if not bad:
        assert "the change stands: against the control group prefetching saves 4" in did.said
        assert after.entries[0].window == BAD
        return
    assert after.entries[0].window == DEFAULT_WINDOW
    event = shelf.events()[0]
    assert event.act == "undone"
    assert event.evidence is not None
    assert event.evidence["by"] == "control"
    assert event.evidence["after"]["high"] < 0.0 < event.evidence["before"]["low"]
    assert msgspec.json.encode(event)


def test_what_people_pinned_is_not_undone(history: Path) -> None:
    state, shelf = store("a", windows=WindowBook((BookEntry(ALL_MODELS), BookEntry(Segment("never", (("hinted", 2.0, 3.0),))))))
    changed_at(shelf, NOW_S - 86_400.0)
    shelf.pin(ALL_MODELS.name, None, "ann", NOW_S - 80_000.0)
    watch_windows(run(), state, history, SETTINGS, NOW_S)
    assert shelf.read()[0].entries[0].window == BAD
