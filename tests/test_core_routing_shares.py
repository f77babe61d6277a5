"""Where requests go, learned from rows that name their node; and what a second copy earns."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.routing_shares import HALF_LIFE_S, RoutingShares, decayed, second_copy_gain

T0 = 1_767_225_600.0


def seen(*nodes: str | None, gap_s: float = 1.0) -> RoutingShares:
    shares = RoutingShares()
    for i, node in enumerate(nodes):
        shares.saw("m", node, T0 + i * gap_s)
    return shares


def test_shares_are_those_of_the_rows_and_what_is_left_names_no_node() -> None:
    shares = seen("a", "a", "b", None, gap_s=0.0)
    assert shares.of("m", ["a", "b", "c"]) == {"a": 0.5, "b": 0.25}
    assert shares.of("other", ["a"]) == {}
    assert seen(None, None).of("m", ["a"]) == {}


def test_the_share_of_a_node_that_is_gone_is_split_among_the_others() -> None:
    shares = seen("a", "a", "b", gap_s=0.0)
    assert shares.of("m", ["b", "c"]) == {"b": 1.0}
    assert shares.of("m", ["c"]) == {}


def test_a_router_that_changes_its_mind_is_followed_within_hours() -> None:
    shares = seen(*["a"] * 100)
    for hour in range(1, 5):
        for i in range(25):
            shares.saw("m", "b", T0 + hour * HALF_LIFE_S + i)
    found = shares.of("m", ["a", "b"])
    assert found["b"] > 0.8
    assert list(found) == ["b", "a"]


def test_a_model_that_rests_for_long_goes_where_it_went_and_is_forgotten_after_a_month() -> None:
    shares = seen("a", "a", "b")
    shares.forget(T0 + 7 * 86_400.0)
    assert shares.of("m", ["a", "b"])["a"] == pytest.approx(2 / 3, abs=0.01)
    shares.forget(T0 + 31 * 86_400.0)
    assert shares.of("m", ["a", "b"]) == {}
    assert shares.models() == []


def test_only_names_of_nodes_count_as_routes() -> None:
    assert seen(None).models() == []
    assert seen(None, "a").models() == ["m"]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0.0, 1e6)), min_size=1, max_size=50))
def test_shares_add_up_to_one_at_most_whatever_comes(rows: list[tuple[str | None, float]]) -> None:
    shares = RoutingShares()
    for node, at_s in rows:
        shares.saw("m", node, T0 + at_s, waited=at_s > 5e5)
    found = shares.of("m", ["a", "b", "c"])
    assert 0.0 <= sum(found.values()) <= 1.0 + 1e-9
    assert all(0.0 <= shares.behind("m", node) < 1.0 for node in ("a", "b", "c"))


def test_rows_that_wait_at_their_node_count_as_behind_and_a_few_say_little() -> None:
    shares = RoutingShares()
    shares.saw("m", "a", T0, waited=True)
    assert shares.behind("m", "a") == pytest.approx(1 / 9)
    for i in range(32):
        shares.saw("m", "a", T0 + i, waited=True)
    assert shares.behind("m", "a") == pytest.approx(33 / 41, abs=0.01)
    assert shares.behind("m", "b") == 0.0


def test_a_snapshot_is_json_and_brings_all_of_it_back() -> None:
    shares = seen("a", "b", None)
    other = RoutingShares()
    other.restore(json.loads(json.dumps(shares.snapshot())))
    assert other.of("m", ["a", "b"]) == shares.of("m", ["a", "b"])
    assert other.snapshot() == shares.snapshot()


@pytest.mark.parametrize("bad", [[], {"m": 3}, {"m": {"a": [1.0]}}, {"m": {"a": "xyz"}}, {"m": {"a": [1.0, {}, 2.0]}}])
def test_what_is_no_snapshot_is_refused_and_changes_nothing(bad: object) -> None:
    shares = seen("a")
    with pytest.raises(ValueError, match="routes"):
        shares.restore(bad)  # type: ignore[arg-type]
    assert shares.of("m", ["a"]) == {"a": 1.0}


def test_time_that_goes_back_takes_nothing_away() -> None:
    assert decayed(4.0, T0, T0 - 100.0, HALF_LIFE_S) == 4.0
    assert decayed(4.0, T0, T0 + HALF_LIFE_S, HALF_LIFE_S) == 2.0


def test_a_second_copy_earns_only_what_the_first_leaves() -> None:
    # Nobody is sent elsewhere and nobody waits: nothing.
    assert second_copy_gain(1.0, 0.0, 0.0, 10.0, 10.0) == 0.0
    # Every fourth row is sent there, and misses for 8 s.
    assert second_copy_gain(0.1, 0.25, 0.0, 8.0, 5.0) == pytest.approx(0.2)
    # Of the others half wait 4 s behind the first one's link.
    assert second_copy_gain(0.1, 0.25, 0.5, 8.0, 4.0) == pytest.approx(0.1 * (2.0 + 0.75 * 2.0))
