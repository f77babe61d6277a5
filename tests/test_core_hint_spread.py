"""Hints without a model: what such hints led to, by place and by user, bounded, and the same after a restart."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.hint_spread import LEAST_LIKELY, MOST_LIKELY, HintSpread


def test_a_place_is_known_by_what_its_hints_led_to() -> None:
    spread = HintSpread()
    for n in range(40):
        spread.saw("popular", None, 100.0 * n)
        spread.hinted(f"h{n}", "page", "drawing", f"u{n}", 100.0 * n + 1.0, 100.0 * n + 60.0)
        spread.saw("sd", f"u{n}", 100.0 * n + 5.0)
    assert spread.likely("page", "drawing")[0][0] == "sd"
    assert spread.likely("page", "drawing")[0][1] > 0.7
    assert dict(spread.likely("page", "elsewhere"))["popular"] > 0.4


def test_a_user_counts_more_than_the_place() -> None:
    spread = HintSpread()
    for n in range(30):
        spread.hinted(f"h{n}", "page", "", f"u{n}", 10.0 * n, 10.0 * n + 60.0)
        spread.saw("common", f"u{n}", 10.0 * n + 1.0)
        spread.saw("mine", "me", 10.0 * n + 2.0)
    assert spread.likely("page", "", "me")[0][0] == "mine"
    assert spread.likely("page", "", "u999")[0][0] == "common"


def test_a_row_of_another_user_or_after_its_time_is_no_lesson() -> None:
    spread = HintSpread()
    spread.hinted("a", "page", "", "me", 0.0, 60.0)
    spread.saw("x", "other", 10.0)
    spread.saw("y", "me", 61.0)
    assert spread.places().keys() == {""}
    spread.hinted("b", "page", "", None, 100.0, 160.0)
    spread.saw("z", "anybody", 110.0)
    assert spread.places().keys() == {"", "page\0"}


def test_nothing_known_says_nothing() -> None:
    assert HintSpread().hinted("a", "page", "", None, 0.0, 60.0) == []


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.integers(0, 30), st.sampled_from(["u", "v", None]), st.sampled_from(["", "chat"]), st.floats(0.0, 100.0)
        ),
        max_size=80,
    )
)
def test_chances_never_exceed_one_and_a_restart_changes_nothing(steps: list[tuple[bool, int, str | None, str, float]]) -> None:
    spread, twin, now_s = HintSpread(), HintSpread(), 0.0
    for n, (is_hint, number, who, surface, wait_s) in enumerate(steps):
        now_s += wait_s
        if is_hint:
            found = spread.hinted(f"h{number}", "page", surface, who, now_s, now_s + 60.0)
            assert found == twin.hinted(f"h{number}", "page", surface, who, now_s, now_s + 60.0)
            assert len(found) <= MOST_LIKELY
            assert sum(p for _, p in found) <= 1.0 + 1e-9
            assert all(p >= LEAST_LIKELY for _, p in found)
        else:
            spread.saw(f"m{number}", who, now_s)
            twin.saw(f"m{number}", who, now_s)
        if n % 10 == 0:
            twin = HintSpread.restore(json.loads(json.dumps(twin.snapshot())))
            spread = HintSpread.restore(spread.snapshot())
    assert spread.snapshot() == twin.snapshot()
