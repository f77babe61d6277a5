"""The cascade: what it plays is what it says, its invariants count what they are to count, and placement keeps them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from prefetcher.bench import cascade
from prefetcher.bench.cascade import Call, Cascade, figures_of, make_cascade, play, play_all
from prefetcher.core.node import BLOCK_BYTES

T0 = 1_767_225_600.0
GB = 10**9
#: Of a link of 1 GB/s.
BLOCK_S = BLOCK_BYTES / GB


def by_hand(*calls: tuple[float, str, float], busy: tuple[int, ...] = ()) -> Cascade:
    """Calls of so many seconds of load at 1 GB/s, on eight nodes."""
    made = tuple(Call(T0 + at_s, model, round(load_s * GB)) for at_s, model, load_s in calls)
    return Cascade(0, busy, (-0.5,) * 8, made, 1e9)


def always(name: str) -> cascade.Chooser:
    return lambda model: name


def test_waits_are_those_of_a_link_that_serves_in_smiths_order() -> None:
    calls = by_hand((0.0, "a", 5.0), (0.1, "b", 8.0), (0.2, "c", 2.0))
    outcome = play(calls, lambda fleet: always("node-0"))
    # c overtakes b, and what runs gives way to it within a block.
    assert outcome.waits_s == pytest.approx([5.0 + 2.0, 2.0 + 5.0 + 8.0 - 0.1, 2.0], abs=2 * BLOCK_S)
    plain = play(calls, lambda fleet: always("node-0"), plain=True)
    assert plain.waits_s == pytest.approx([5.0, 5.0 + 2.0 + 8.0 - 0.1, 5.0 + 2.0 - 0.2])
    assert outcome.nodes == ["node-0"] * 3
    # The other seven were idle.
    assert outcome.queued_beside_idle == 2
    assert (outcome.not_served, outcome.loaded_twice) == (0, 0)


def test_a_busy_node_has_ten_seconds_to_do_before() -> None:
    outcome = play(by_hand((0.5, "a", 3.0), busy=(0,)), lambda fleet: always("node-0"), plain=True)
    # Six seconds run; three are denser than four.
    assert outcome.waits_s == pytest.approx([6.0 + 3.0 - 0.5])
    assert outcome.queued_s == pytest.approx(6.0 + 13.0)
    free = play(by_hand((0.5, "a", 3.0), busy=(0,)), lambda fleet: always("node-1"), plain=True)
    assert (free.waits_s, free.queued_s) == (pytest.approx([3.0]), pytest.approx(6.0 + 10.0))
    # Where loads give way, the four go first, and the three before what is left of them.
    outcome = play(by_hand((0.5, "a", 3.0), busy=(0,)), lambda fleet: always("node-0"))
    assert outcome.waits_s == pytest.approx([3.0], abs=2 * BLOCK_S)
    assert outcome.queued_s == pytest.approx(7.0 + 13.0, abs=4 * BLOCK_S)


def test_a_model_that_is_sent_to_two_nodes_is_counted() -> None:
    calls = by_hand((0.0, "a", 5.0), (0.1, "a", 5.0))
    nodes = iter(["node-0", "node-1"])
    outcome = play(calls, lambda fleet: lambda model: next(nodes))
    assert outcome.loaded_twice == 2
    assert play(calls, lambda fleet: always("node-3")).loaded_twice == 0


def test_the_same_seed_is_the_same_cascade_and_half_of_the_nodes_are_busy() -> None:
    one = make_cascade(11)
    assert one == make_cascade(11)
    assert one != make_cascade(12)
    assert len(one.busy) == 4
    assert 3 <= len(one.calls) <= 10
    assert all(T0 <= call.at_s < T0 + 1.0 and 14 * GB <= call.size_bytes <= 35 * GB for call in one.calls)
    assert [call.at_s for call in one.calls] == sorted(call.at_s for call in one.calls)


def test_placement_keeps_every_invariant_and_waits_less_than_both_peers() -> None:
    figures = figures_of(play_all(range(12)))
    assert figures["violations"] == 0
    assert figures["ratio_to_plain"] < 0.7
    assert figures["ratio_to_plain"] < figures["ratio"] < 0.85
    # Within a few hundredths of what could be done if all was known.
    assert figures["least_ratio"] <= figures["foresight_ratio"]
    assert figures["ratio_with_queued"] <= figures["foresight_ratio_with_queued"] + 0.03
    assert figures["ratio_to_least_loaded"] < 1.0
    assert figures["calls"] == sum(len(make_cascade(seed).calls) for seed in range(12))
    # Faster loads leave more of the wait to the queue, which placement takes away.
    faster = figures_of(play_all(range(12), 14e9), 14e9)
    assert faster["violations"] == 0
    assert faster["ratio_to_plain"] < figures["ratio_to_plain"]


def test_the_bench_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cascade, "_QUICK_SEEDS", 2)
    cascade.run(tmp_path / "new" / "cascade.json", quick=True)
    written = json.loads((tmp_path / "new" / "cascade.json").read_text())
    assert written == json.loads(capsys.readouterr().out)
    assert written["figures"]["seeds"] == 2
    assert written["peers"].keys() == {"rendezvous", "rendezvous-plain", "least-loaded", "foresight"}
    assert all(math.isfinite(peer["cold_seconds"]) for peer in written["peers"].values())
