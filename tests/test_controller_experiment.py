"""The control group runs where there are nodes enough, everybody knows from when, and what it proves is read from what is stored."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from prefetcher.bench.made_blocks import FIRST_BLOCK, make_blocks, observed
from prefetcher.controller import records
from prefetcher.controller.effects import EffectReader
from prefetcher.controller.experiment import EXPERIMENT, Experiment, ExperimentKeeper, ExperimentView, Span, decode_experiment, nodes_needed
from prefetcher.core.block_sums import BlockSum
from prefetcher.core.holdout import HoldoutSettings, arm_of
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.types import Arm, NodeName
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

NODES = [NodeName(f"node-{k}") for k in range(16)]
NOON_S = FIRST_BLOCK * 3600.0 + 12 * 3600.0


def keeper(state: MemoryState, share: float = 0.05, metrics: Metrics | None = None) -> ExperimentKeeper:
    return ExperimentKeeper(state, ExperimentView(state), metrics or Metrics(), share, 0)


def known(state: MemoryState) -> Experiment:
    return decode_experiment(state.read(EXPERIMENT))


def test_as_many_nodes_are_needed_as_find_a_saving_of_three_tenths_in_four_weeks() -> None:
    needed = nodes_needed(0.05)
    assert needed == 4
    more = nodes_needed(0.02)
    assert more is not None
    assert more > needed
    assert nodes_needed(0.0) is None


def test_with_one_node_no_control_group_runs_and_it_says_what_it_takes() -> None:
    state = MemoryState()
    keeper(state).tick(NOON_S, 1, NODES[:1], {})
    assert known(state).spans == ()
    assert "1 node, and a control group needs 4" in known(state).why


def test_switched_off_is_said() -> None:
    state = MemoryState()
    keeper(state, share=0.0).tick(NOON_S, 1, NODES, {})
    assert known(state).spans == ()
    assert "control_ratio is 0" in known(state).why


def test_it_begins_with_a_block_that_everybody_has_heard_of_and_all_draw_alike() -> None:
    state, metrics = MemoryState(), Metrics()
    view = ExperimentView(state)
    late_s = NOON_S + 3580.0  # the next block is too near
    of = keeper(state, metrics=metrics)
    of.tick(late_s, 1, NODES, {})
    view.look()
    (span,) = view.known.spans
    assert span == Span(NOON_S + 2 * 3600.0, 0.05, 0)
    hours = [NOON_S + hour * 3600.0 for hour in range(60)]
    assert all(view.arm(node, now_s) is Arm.TREATED for node in NODES for now_s in hours[:2])
    drawn = [view.arm(node, now_s) for node in NODES for now_s in hours[2:]]
    assert drawn == [arm_of(node, now_s, HoldoutSettings(share=0.05))[0] for node in NODES for now_s in hours[2:]]
    assert Arm.CONTROL in drawn
    for now_s in hours[2:]:
        of.tick(now_s, 1, NODES, {})
        shown = [metrics.registry.get_sample_value("prefetcher_experiment_nodes", {"arm": arm.value}) for arm in Arm]
        assert shown == [sum(view.arm(node, now_s) is arm for node in NODES) for arm in Arm]
    assert known(state).spans == (span,)


def test_it_ends_with_too_few_nodes_and_begins_anew() -> None:
    state = MemoryState()
    of = keeper(state)
    of.tick(NOON_S, 1, NODES, {})
    of.tick(NOON_S + 10 * 3600.0, 1, NODES[:3], {})
    (span,) = known(state).spans
    assert (span.from_s, span.until_s) == (NOON_S + 3600.0, NOON_S + 11 * 3600.0)
    view = ExperimentView(state)
    view.look()
    assert {view.arm(node, NOON_S + hour * 3600.0) for node in NODES for hour in range(11, 80)} == {Arm.TREATED}
    of.tick(NOON_S + 20 * 3600.0, 1, NODES, {})
    assert len(known(state).spans) == 2
    assert known(state).spans[1].from_s == NOON_S + 21 * 3600.0


def test_another_share_or_seed_is_a_span_of_its_own() -> None:
    state = MemoryState()
    keeper(state).tick(NOON_S, 1, NODES, {})
    keeper(state, share=0.1).tick(NOON_S + 5 * 3600.0, 1, NODES, {})
    first, second = known(state).spans
    assert first.until_s == second.from_s == NOON_S + 6 * 3600.0
    assert second.share == 0.1


def test_a_controller_that_leads_no_more_changes_nothing() -> None:
    state = MemoryState()
    assert state.write_fenced(records.FENCE, 7, {})
    keeper(state).tick(NOON_S, 6, NODES, {})
    assert state.read(EXPERIMENT) is None


def test_a_store_that_forgets_is_told_again_and_nonsense_changes_nobodys_side() -> None:
    state = MemoryState()
    keeper(state).tick(NOON_S, 1, NODES, {})
    view = ExperimentView(state)
    view.look()
    before = view.known
    state.delete([EXPERIMENT])
    view.look()
    assert known(state) == before
    state.write({EXPERIMENT: b"nonsense"})
    view.look()
    assert view.known == before


def test_what_a_shadow_waited_is_kept_once() -> None:
    state = MemoryState()
    shadow = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600.0, tick_s=60.0, start_s=NOON_S)
    shadow.shadow_measured = {100: 5.0, 101: 7.5}
    keeper(state).tick(NOON_S, 1, NODES[:1], {NODES[0]: shadow})
    shadow.shadow_measured[102] = 1.0
    # Another term begins where the last one ended.
    keeper(state).tick(NOON_S, 2, NODES[:1], {NODES[0]: shadow})
    kept = [msgspec.json.decode(each) for each in state.tail(records.node_key(NODES[0], "shadow"), 10)]
    assert kept == [[100, 5.0], [101, 7.5], [102, 1.0]]


# --- what it proves ---


def fill(state: MemoryState, seed: int, nodes: int, days: int, span: Span | None) -> float:
    """Writes what nodes and the controller would have; the true saving."""
    made = make_blocks(np.random.default_rng(seed), nodes, days)
    settings = HoldoutSettings(share=0.0 if span is None else span.share)
    hours = made.with_s.shape[1]
    drawn = [[arm_of(node, (FIRST_BLOCK + hour) * 3600.0, settings)[0] is Arm.CONTROL for hour in range(hours)] for node in NODES[:nodes]]
    control = np.array(drawn)
    cold_s = observed(made, control)
    for k, node in enumerate(NODES[:nodes]):
        state.see(records.NODES, node, NOON_S)
        blocks = [
            BlockSum(FIRST_BLOCK + h, bool(control[k, h]), int(made.rows[k, h]), float(cold_s[k, h]), 1, 3000.0) for h in range(hours)
        ]
        # The two that may still change are not looked at.
        blocks += [BlockSum(FIRST_BLOCK + hours + h, False, 1, 1e9, 1, 3000.0) for h in range(2)]
        state.write({records.node_key(node, "blocks"): records.encode(blocks)})
        waited = [records.encode((FIRST_BLOCK + h, float(made.shadow_s[k, h]))) for h in range(hours)]
        state.append(records.node_key(node, "shadow"), waited, 2_000)
    if span is not None:
        state.write({EXPERIMENT: records.encode(Experiment(NOON_S, "a control group runs", nodes, 4, (span,)))})
    return made.saving


def test_a_saving_is_read_from_what_is_stored() -> None:
    state = MemoryState()
    saving = fill(state, 3, 16, 14, Span(FIRST_BLOCK * 3600.0, 0.05, 0))
    told = EffectReader(state).read(NOON_S)
    assert told["basis"] == "control"
    assert told["found"]
    assert told["running"]
    assert told["low"] < saving < told["high"]
    assert told["blocks"] == 16 * 14 * 24
    assert told["blocks_left_out"] == 0
    assert "less waiting than the control group" in told["words"]
    assert msgspec.json.encode(told)
    week = EffectReader(state).read(NOON_S, until_s=(FIRST_BLOCK + 7 * 24) * 3600.0)
    assert week["blocks"] == 16 * 7 * 24


def test_blocks_that_were_not_as_drawn_are_no_evidence() -> None:
    state = MemoryState()
    fill(state, 3, 4, 3, Span(FIRST_BLOCK * 3600.0, 0.05, 0))
    key = records.node_key(NODES[0], "blocks")
    raw = state.read(key)
    assert raw is not None
    blocks = msgspec.json.decode(raw, type=list[BlockSum])
    blocks[0].control = not blocks[0].control
    blocks[1].on_s = 1000.0
    state.write({key: records.encode(blocks), records.node_key(NODES[1], "blocks"): b"nonsense"})
    told = EffectReader(state).read(NOON_S)
    assert told["blocks_left_out"] == 2
    assert told["blocks"] == 3 * 3 * 24 - 2


@pytest.mark.parametrize("nodes", [1, 3])
def test_without_a_control_group_it_says_that_only_shadow_caches_speak(nodes: int) -> None:
    state = MemoryState()
    fill(state, 5, nodes, 4, None)
    told = EffectReader(state).read(NOON_S)
    assert told["basis"] == "shadow"
    assert not told["running"]
    assert told["low"] is None
    assert "no control group runs" in told["words"]
    assert "not an experiment" in told["words"]


def test_an_empty_installation_has_nothing_to_say() -> None:
    assert EffectReader(MemoryState()).read(NOON_S)["basis"] == "nothing"
