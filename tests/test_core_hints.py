"""The hint book: folding, settling once, belief by source, and a restart that changes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefetcher.core.hints import Hint, HintBook


def hint(n: int, model: str = "m", source: str = "page", session: str | None = None, at_s: float = 100.0, ttl_s: float = 60.0) -> Hint:
    return Hint(f"h{n}", model, source, session, at_s, at_s, at_s + ttl_s)


def test_a_hint_makes_its_model_expected_until_its_end() -> None:
    book = HintBook()
    assert book.add(hint(1), 100.0) == "new"
    said = book.expected("m", 100.0)
    assert said is not None
    assert said.probability == 0.5
    assert said.until_s == 160.0
    # P / E[min(T, 60)], T even over 60 s with probability one half, else 60.
    assert said.per_s == pytest.approx(0.5 / (0.5 * 30.0 + 0.5 * 60.0))
    assert book.expected("other", 100.0) is None
    assert book.expected("m", 160.0) is None


def test_the_same_id_counts_once_and_the_same_session_folds() -> None:
    book = HintBook()
    assert [book.add(hint(1, session="s"), 100.0) for _ in range(3)] == ["new", "repeated", "repeated"]
    assert book.add(hint(2, session="s", at_s=110.0), 110.0) == "folded"
    assert len(book) == 1
    said = book.expected("m", 110.0)
    assert said is not None
    assert said.until_s == 170.0
    assert book.expire(160.0) == 0, "its end was moved"
    assert book.expire(170.0) == 1
    assert len(book) == 0
    assert book.add(hint(3, at_s=0.0), 100.0) == "past"


def test_a_flood_of_one_source_says_no_more_than_one_hint() -> None:
    book = HintBook()
    book.add(hint(0), 100.0)
    one = book.expected("m", 100.0)
    for n in range(1, 50):
        book.add(hint(n, session=f"s{n}"), 100.0)
    assert book.expected("m", 100.0) == one
    book.add(hint(99, source="other"), 100.0)
    more = book.expected("m", 100.0)
    assert one is not None
    assert more is not None
    assert more.probability == 0.75


def test_a_source_that_never_converts_loses_its_weight_and_can_win_it_back() -> None:
    book = HintBook()
    for n in range(50):
        book.add(hint(n, session=f"s{n}", at_s=float(n), ttl_s=1.0), float(n))
        book.expire(n + 1.0)
    assert book.belief("page") < 0.05
    assert book.belief("unknown") == 0.5
    low = book.belief("page")
    for n in range(100, 150):
        book.add(hint(n, session=f"s{n}", at_s=float(n)), float(n))
        assert book.used("m", n + 0.5) == 1
    assert book.belief("page") > 0.4 > low
    assert (book.kept, book.broken) == (50, 50)


def test_a_row_from_before_the_hint_does_not_keep_it() -> None:
    book = HintBook()
    book.add(hint(1), 100.0)
    assert book.used("m", 99.0) == 0
    assert book.used("m", 101.0) == 1


@example(steps=[("x", 1, 1, 0.0), ("a", 0, 0, 1.0), ("x", 1, 1, 0.0), ("a", 0, 0, 37.0), ("e", 0, 0, 23.0)])
@given(st.lists(st.tuples(st.sampled_from("auxe"), st.integers(0, 3), st.integers(0, 2), st.floats(0, 50)), max_size=60))
def test_every_hint_is_settled_once_and_a_restart_changes_nothing(steps: list[tuple[str, int, int, float]]) -> None:
    book, twin, now_s, new = HintBook(), HintBook(), 0.0, 0
    for number, (what, model, source, wait_s) in enumerate(steps):
        now_s += wait_s
        for each in (book, twin):
            if what in "ax":
                said = each.add(hint(number, f"m{model}", f"p{source}", "s" if what == "x" else None, now_s), now_s)
                new += said == "new" and each is book
            elif what == "u":
                each.used(f"m{model}", now_s)
            else:
                each.expire(now_s)
        twin = HintBook.restore(json.loads(json.dumps(twin.snapshot())))
        assert len(book) + book.kept + book.broken == new
        for model_name in ("m0", "m1", "m2", "m3"):
            assert book.expected(model_name, now_s) == twin.expected(model_name, now_s)
    assert book.snapshot() == twin.snapshot()
    book.expire(1e9)
    assert len(book) == 0
    assert not book.models()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "use", "pass"]),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["s", "t", None]),
            st.integers(0, 40),
            st.integers(1, 60),
        ),
        max_size=60,
    )
)
def test_what_is_kept_up_to_date_is_what_the_open_hints_say(steps: list[tuple[str, str, str | None, int, int]]) -> None:
    book, now_s = HintBook(), 100.0
    for n, (what, source, session, in_s, ttl_s) in enumerate(steps):
        match what:
            case "add":
                book.add(Hint(f"h{n}", "m", source, session, now_s, now_s + in_s, now_s + in_s + ttl_s), now_s)
            case "use" if in_s < 5:
                book.used("m", now_s)
            case _:
                now_s += in_s
                book.expire(now_s)
        said, anew = book.expected("m", now_s), HintBook.restore(book.snapshot()).expected("m", now_s)
        assert (said is None) == (anew is None)
        if said is not None and anew is not None:
            assert (said.at_s, said.until_s) == (anew.at_s, anew.until_s)
            assert said.probability == pytest.approx(anew.probability)


def test_ends_of_settled_and_moved_hints_do_not_pile_up() -> None:
    book = HintBook()
    for n in range(50_000):
        book.add(hint(n, session=f"s{n % 100}", at_s=0.001 * n, ttl_s=86_400.0), 0.001 * n)
        if n % 3 == 0:
            book.used("m", 0.001 * n)
    assert len(book) <= 100
    assert len(book._ends) < 11_000
    book.expire(1e9)
    assert len(book) == 0


def test_an_expectation_names_the_source_that_is_believed_most() -> None:
    book = HintBook()
    for number in range(8):
        book.add(hint(number, f"m{number}", "good"), 100.0)
        book.used(f"m{number}", 110.0)
        book.add(hint(100 + number, f"n{number}", "bad"), 100.0)
    book.expire(200.0)
    for number, source in enumerate(("bad", "good", "unheard of"), start=1000):
        book.add(hint(number, "m", source, at_s=200.0), 200.0)
        said = book.expected("m", 200.0)
        assert said is not None
        assert said.source == ("bad" if source == "bad" else "good")
