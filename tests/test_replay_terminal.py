"""What a replay prints: a table that fits its width with whole numbers, and notes on capacities that somebody may not have meant."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from prefetcher.replay.capacity import bytes_in_words, capacity_notes
from prefetcher.replay.terminal import policies_table, scored_in_words

GB = 10**9


def entry(policy: str, figure: float | None, count: int = 2810) -> dict[str, object]:
    keys = ("cold_seconds", "wait_p95_s", "wait_p99_s", "held_gb_h", "idle_gb_h", "wasted_gb_h", "moved_gb")
    return {"policy": policy, "cold_starts": count, **dict.fromkeys(keys, figure)}


def printed(entries: list[dict[str, object]], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(policies_table(entries, width))
    return out.getvalue().splitlines()


@settings(deadline=None)
@given(
    figures=st.lists(st.floats(0, 1e12) | st.none(), min_size=1, max_size=4),
    count=st.integers(0, 10**9),
    width=st.integers(60, 200),
)
def test_a_table_fits_its_width_and_no_number_or_word_is_split(figures: list[float | None], count: int, width: int) -> None:
    lines = printed([entry(f"p{i}", figure, count) for i, figure in enumerate(figures)], width)
    assert max(map(len, lines)) <= width
    # A line for each policy, and nothing else between the rule below the headings and the border at the foot.
    assert [line.split()[1] for line in lines[-1 - len(figures) : -1]] == [f"p{i}" for i in range(len(figures))]
    assert f" {count:,} " in lines[-2] or "starts" not in "".join(lines)
    words = set("".join(lines[1 : -2 - len(figures)]).replace("┃", " ").split())
    assert words <= {"policy", "cold", "starts", "seconds", "p95", "p99", "wait,", "s", "GB·h", "held", "idle", "wasted", "GB", "moved"}
    assert "seconds" in words


def test_wide_terminals_get_all_columns_and_narrow_ones_the_first() -> None:
    entries = [entry("lhd-smith", 19143.0)]
    assert "│ lhd-smith │       2,810 │       19,143 │" in printed(entries, 130)[3]
    assert "wasted" in " ".join(printed(entries, 90))
    narrow = " ".join(printed(entries, 60))
    assert "held" in narrow
    assert "wasted" not in narrow
    # Names give way before figures do.
    assert " 19,143 " in " ".join(printed(entries, 20))


def test_what_is_scored_is_said() -> None:
    assert scored_in_words(13162, 14266, 256.7) == "scored: 13,162 of 14,266 requests, the last 11 days"
    assert scored_in_words(5, 8, 1.5) == "scored: 5 of 8 requests, the last 1.5 hours"
    assert scored_in_words(2, 3, 0.038) == "scored: 2 of 3 requests, the last 2.3 minutes"


# --- capacities ---

SIZES = np.array([2 * GB, 5 * GB, 30 * GB])
ALL = [np.array([0, 1, 2, 1], np.int32)]


@pytest.mark.parametrize(
    ("capacity", "ratio", "said"),
    [
        (
            35 * 37 * GB,
            35.0,
            "holds all models, 37 GB of weights in 1.29 TB: nothing ever has to make room; did you mean --capacity-ratio 0.35?",
        ),
        (37 * GB, 1.0, "holds all models, 37 GB of weights in 37 GB: nothing ever has to make room; give less"),
        (80 * GB, None, "holds all models, 37 GB of weights in 80 GB: nothing ever has to make room; give less"),
        (10**6, None, "no model fits: the capacity is 1 MB, the smallest model has 2 GB"),
        (6 * GB, None, "1 of 3 models doesn't fit: the capacity is 6 GB, the largest model has 30 GB"),
        (3 * GB, None, "2 of 3 models don't fit: the capacity is 3 GB, the largest model has 30 GB"),
    ],
)
def test_capacities_that_may_not_be_meant_are_questioned(capacity: float, ratio: float | None, said: str) -> None:
    (note,) = capacity_notes(SIZES, ALL, capacity, ratio)
    assert said in note


def test_ordinary_capacities_are_not_questioned() -> None:
    assert capacity_notes(SIZES, ALL, 36 * GB, 0.97) == []
    # Two nodes of 31 GB: the second one can't hold both of its models.
    apart = [np.array([0, 1], np.int32), np.array([1, 2], np.int32)]
    assert capacity_notes(SIZES, apart, 31 * GB) == []
    (note,) = capacity_notes(SIZES, apart, 35 * GB)
    assert note.startswith("a node's capacity holds all models")


@pytest.mark.parametrize(
    ("size", "words"), [(1, "1 bytes"), (999, "999 bytes"), (10**6, "1 MB"), (44.58e9, "44.6 GB"), (2.5e12, "2.5 TB"), (9e15, "9,000 TB")]
)
def test_sizes_in_words(size: float, words: str) -> None:
    assert bytes_in_words(size) == words
