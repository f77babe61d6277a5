"""How far hints announce uses: by model and of all, followed when pages begin and stop sending them; and what that leaves to forecasts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.announced import Announced
from prefetcher.core.hints import Hint, HintBook
from prefetcher.core.value import LEAST_BEYOND_HINTS, beyond_hints


def starts(of: Announced, model: str, count: int, lead_s: float | None, *, from_s: float = 0.0) -> float:
    """Starts an hour apart; when the next would be."""
    for n in range(count):
        at_s = from_s + 3600.0 * n
        of.saw(model, at_s, None if lead_s is None else at_s - lead_s)
    return from_s + 3600.0 * count


def test_a_model_that_is_always_announced_is_known_to_be_after_some_starts() -> None:
    of = Announced()
    assert of.of("m") == (0.0, 0.0)
    starts(of, "m", 3, 5.0)
    early, _ = of.of("m")
    starts(of, "m", 30, 5.0, from_s=1e6)
    late, lead_s = of.of("m")
    assert 0.3 < early < 0.6 < 0.85 < late < 1.0
    assert lead_s == pytest.approx(5.0)


def test_a_new_model_is_taken_to_be_as_all_are_and_one_that_is_not_announced_as_itself() -> None:
    of = Announced()
    for n in range(40):
        starts(of, f"page{n}", 10, 8.0, from_s=1e5 * n)
    starts(of, "cron", 20, None)
    new, lead_s = of.of("new")
    assert new > 0.8
    assert lead_s == pytest.approx(8.0)
    assert of.of("cron")[0] < 0.25


def test_a_page_that_stops_is_noticed() -> None:
    of = Announced()
    end_s = starts(of, "m", 200, 5.0)
    starts(of, "m", 10, None, from_s=end_s)
    assert of.of("m")[0] < 0.6
    starts(of, "m", 40, None, from_s=2.0 * end_s)
    assert of.of("m")[0] < 0.2


def test_rows_that_go_on_with_a_use_are_no_starts() -> None:
    of = Announced()
    assert of.saw("m", 0.0, None)
    assert [of.saw("m", 50.0 * n, None) for n in range(1, 5)] == [False] * 4
    assert of.saw("m", 260.0, None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 5000.0), st.one_of(st.none(), st.floats(0.0, 100.0))), max_size=60))
def test_shares_are_shares_and_a_restart_changes_nothing(rows: list[tuple[str, float, float | None]]) -> None:
    of, now_s = Announced(), 0.0
    for model, gap_s, lead_s in rows:
        now_s += gap_s
        of.saw(model, now_s, None if lead_s is None else now_s - lead_s)
        for name in "abcd":
            share, mean_s = of.of(name)
            assert 0.0 <= share < 1.0
            assert 0.0 <= mean_s <= 100.0 + 1e-9
    again = Announced.restore(json.loads(json.dumps(of.snapshot())))
    assert [again.of(name) for name in "abcd"] == [of.of(name) for name in "abcd"]


def test_a_snapshot_of_something_else_is_refused() -> None:
    for bad in ({}, {"all": [1.0], "of": []}, {"all": [0.0, 0.0, 0.0], "of": [["m", 1.0]]}):
        with pytest.raises((KeyError, ValueError)):
            Announced.restore(bad)


def test_only_hints_that_are_likely_enough_to_be_acted_on_announce() -> None:
    book = HintBook()
    for n in range(60):
        for model, chance in (("sure", 0.9), ("unsure", 0.3)):
            at_s = 1000.0 * n
            book.add(Hint(f"{model}{n}", model, model, None, at_s, at_s, at_s + 60.0, chance=chance), at_s)
            book.used(model, at_s + 6.0)
    assert book.announced.of("sure")[0] > 0.8
    assert book.announced.of("sure")[1] == pytest.approx(6.0)
    assert book.announced.of("unsure")[0] < 0.2
    again = HintBook.restore(json.loads(json.dumps(book.snapshot())))
    assert again.announced.of("sure") == book.announced.of("sure")


def test_what_a_hint_brings_in_time_is_left_to_it() -> None:
    assert beyond_hints(0.0, 0.0, 10.0) == 1.0
    assert beyond_hints(0.95, 5.0, 2.0) == 0.0
    # It begins five of sixty seconds earlier: most of what a forecast could bring is still to be had.
    assert beyond_hints(0.95, 5.0, 60.0) == pytest.approx(1.0 - 0.95 / 12.0)
    assert beyond_hints(1.0 - LEAST_BEYOND_HINTS, 5.0, 2.0) == pytest.approx(LEAST_BEYOND_HINTS)
