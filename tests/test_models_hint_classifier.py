"""The hint classifier: in force only where it beats the source's record on later hints, the same after a restart, and bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from prefetcher.core.hints import Hint, HintBook
from prefetcher.errors import PredictorError
from prefetcher_models.hint_classifier import FEATURES, HintClassifier


class Product:
    """Sessions that come back, each to its own model; a hint is for a row that comes, or false, for a model drawn blindly."""

    def __init__(self, seed: int, told: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.told = told
        self.book, self.classifier = HintBook(), HintClassifier()
        self.book.on_settled = self.classifier.settled
        self.now_s, self.number = 1.7e9, 0
        #: (told chance or None, belief, came to pass)
        self.judged: list[tuple[float | None, float, bool]] = []
        self._open: dict[str, tuple[float | None, float]] = {}

    def hint(self, model: str, session: str) -> None:
        self.number += 1
        hint = Hint(f"h{self.number}", model, "page", session, self.now_s, self.now_s + 5.0, self.now_s + 65.0, surface="chat")
        belief = self.book.belief("page")
        chance = self.classifier.chance(hint, belief)
        self._open[hint.hint_id] = (chance, belief)
        if self.book.add(hint, self.now_s) != "new":
            del self._open[hint.hint_id]

    def visit(self) -> None:
        session = int(self.rng.integers(20))
        own, other = f"m{session}", f"m{self.rng.integers(20)}"
        false = self.rng.random() < 0.5
        self.now_s += float(self.rng.exponential(90.0))
        self.book.expire(self.now_s)
        # Told apart by nothing, a false hint names the session's own model too.
        self.hint(own if not false or not self.told else other, f"s{session}")
        self.now_s += 5.0
        self.book.expire(self.now_s)
        if not false:
            self.book.used(own, self.now_s)
            self.classifier.saw(own, f"s{session}", self.now_s)

    def run(self, visits: int) -> Product:
        def judge(hint: Hint, kept: bool, at_s: float) -> None:
            self.judged.append((*self._open.pop(hint.hint_id), kept))
            self.classifier.settled(hint, kept, at_s)

        self.book.on_settled = judge
        for _ in range(visits):
            self.visit()
        return self


@pytest.fixture(scope="module")
def told() -> Product:
    return Product(0, told=True).run(1500)


def brier(judged: Iterator[tuple[float, bool]]) -> float:
    return float(np.mean([(p - kept) ** 2 for p, kept in judged]))


def test_where_sessions_tell_it_is_in_force_and_beats_the_record(told: Product) -> None:
    assert told.classifier.stands == "in_force"
    fit = told.classifier.fit
    assert fit is not None
    assert fit.brier < 0.5 * fit.brier_of_record
    late = [(chance, belief, kept) for chance, belief, kept in told.judged[-400:] if chance is not None]
    assert len(late) == 400
    assert brier((c, k) for c, _, k in late) < 0.5 * brier((b, k) for _, b, k in late)


def test_nothing_is_told_before_there_are_settled_hints_to_learn_from() -> None:
    product = Product(1, told=True).run(150)
    assert product.classifier.stands == "too_few"
    assert {chance for chance, _, _ in product.judged} == {None}
    assert product.classifier.fallbacks["too_few"] == 150


def test_where_nothing_tells_hints_apart_the_record_stands() -> None:
    product = Product(2, told=False).run(700)
    assert product.classifier.fit is not None
    assert product.classifier.stands == "no_gain"
    assert product.classifier.fallbacks["no_gain"] > 0
    assert product.judged[-1][0] is None


def test_a_restart_changes_nothing(told: Product) -> None:
    again = HintClassifier.restore(json.loads(json.dumps(told.classifier.snapshot())))
    assert again.snapshot() == told.classifier.snapshot()
    for n, (model, session) in enumerate((("m1", "s1"), ("m2", "s1"), ("new", "new"))):
        hint = Hint(f"x{n}", model, "page", session, told.now_s, told.now_s, told.now_s + 60.0, surface="chat")
        assert again.chance(hint, 0.5) == told.classifier.chance(hint, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"features": list(FEATURES[:-1])},
        {"samples": [[1.0]]},
        {"models": None},
        {"fit": {"text": "tree", "samples": 300, "brier": 0.1, "brier_of_record": 0.2}},
        {"fit": {"text": "", "other": 1}},
    ],
)
def test_another_snapshot_is_refused(told: Product, change: dict[str, object]) -> None:
    with pytest.raises(PredictorError):
        HintClassifier.restore({**told.classifier.snapshot(), **change})


def test_what_is_remembered_is_bounded() -> None:
    classifier = HintClassifier()
    for n in range(21_000):
        hint = Hint(f"h{n}", f"m{n}", f"p{n}", f"s{n}", float(n), float(n), n + 60.0)
        classifier.saw(f"m{n}", f"s{n}", float(n))
        classifier.chance(hint, 0.5)
    snapshot = classifier.snapshot()
    assert len(snapshot["models"]) == len(snapshot["sessions"]) == len(snapshot["recent"]) == 20_000
    assert len(snapshot["pending"]) == 10_000
