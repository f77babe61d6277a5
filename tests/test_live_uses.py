"""Rows and opens that are one use: in any order, late, repeated, and across a restart."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.agent.uses import OPEN_WAITS_S, ROW_WAITS_S, Uses, UsesState
from prefetcher.core.types import ModelName, NodeName, RequestSeen

NODE = NodeName("n")
A, B = ModelName("a"), ModelName("b")


def row(model: ModelName, ts: float, request_id: str | None = None) -> RequestSeen:
    return RequestSeen(ts, model, request_id=request_id)


def announced(uses: Uses, now_s: float, waiting: int = 0) -> list[str]:
    return [found.model for found in uses.overdue(now_s, lambda model: waiting)]


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from("ro"), st.sampled_from([A, B])), max_size=40),
    restart_after=st.integers(0, 40),
)
def test_n_rows_and_m_opens_within_the_time_that_opens_wait_announce_what_is_left_over(
    steps: list[tuple[str, ModelName]], restart_after: int
) -> None:
    uses, uses_seen = Uses(NODE), Counter[ModelName]()
    count: Counter[tuple[str, ModelName]] = Counter()
    for i, (kind, model) in enumerate(steps):
        now_s = 1000.0 + i * OPEN_WAITS_S / 50
        count[kind, model] += 1
        if kind == "r":
            uses_seen[model] += uses.row(row(model, now_s), now_s)
        else:
            uses_seen[model] += not uses.open(model, now_s)
        assert announced(uses, now_s) == []
        if i == restart_after:
            written = json.loads(json.dumps(msgspec.to_builtins(uses.snapshot())))
            uses = Uses(NODE)
            uses.restore(msgspec.convert(written, UsesState), now_s)
    left = Counter(announced(uses, 1000.0 + 2 * OPEN_WAITS_S))
    for model in (A, B):
        assert left[model] == max(0, count["o", model] - count["r", model])
        assert uses_seen[model] == max(count["o", model], count["r", model])
    assert announced(uses, 1e9) == []


def test_an_open_long_after_its_row_was_served_is_one_of_its_own() -> None:
    uses = Uses(NODE)
    assert uses.row(row(A, 0.0), 0.0)
    assert announced(uses, ROW_WAITS_S - 0.1) == []
    assert uses.open(A, ROW_WAITS_S - 0.1)
    assert uses.row(row(A, 1.0), 1.0)
    assert announced(uses, ROW_WAITS_S + 1.0) == []
    assert not uses.open(A, ROW_WAITS_S + 1.0)


def test_while_a_row_waits_for_its_weights_its_open_may_still_come() -> None:
    uses = Uses(NODE)
    uses.row(row(A, 0.0), 0.0)
    for second in range(0, 300, 10):
        announced(uses, float(second), waiting=1)
    assert uses.open(A, 295.0)


def test_what_was_announced_is_no_second_use_when_it_comes_back_and_keeps_its_id_until_it_was() -> None:
    uses = Uses(NODE)
    assert not uses.open(A, 10.0)
    before = uses.snapshot()
    (found,) = uses.overdue(20.0, lambda model: 0)
    assert (found.ts, found.model, found.node) == (10.0, A, NODE)
    assert not uses.row(found, 20.1)
    assert not uses.open(A, 20.2), "it paid for no other open either"
    again = Uses(NODE)
    again.restore(before, 20.0)
    assert again.overdue(20.0, lambda model: 0) == [found], "a killed agent announces it again under the same id"


def test_rows_that_come_again_after_a_restart_count_once_and_new_ones_do_not_suffer() -> None:
    uses = Uses(NODE)
    rows = [row(A, 5.0), row(A, 5.0), row(B, 6.0, "x"), row(A, 7.0)]
    assert [uses.row(r, 8.0) for r in rows] == [True] * 4
    again = Uses(NODE)
    again.restore(uses.snapshot(), 9.0)
    assert [again.row(r, 9.0) for r in rows] == [False] * 4
    assert [again.row(r, 9.1) for r in [*rows, row(A, 9.05)]] == [True] * 5, "repeats within one life are separate requests"


def test_windows_are_real_seconds_on_a_fast_clock() -> None:
    uses = Uses(NODE, speed=1000.0)
    uses.open(A, 0.0)
    assert announced(uses, OPEN_WAITS_S * 999.0) == []
    assert announced(uses, OPEN_WAITS_S * 1000.0) == [A]
