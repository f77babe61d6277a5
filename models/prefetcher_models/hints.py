"""Hints as they are believed: open hints with the chance of each, and what hints without a model lead to; in a controller and in replay.

Three parts learn from the same rows and hints: the book of open hints and of sources' records (`prefetcher.core.hints`), the classifier
(`hint_classifier`) and the models that unnamed hints led to (`prefetcher.core.hint_spread`). Covers no transport and no planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prefetcher.core.hint_spread import HintSpread
from prefetcher.core.hints import Hint, HintBook
from prefetcher.errors import PredictorError
from prefetcher_models.hint_classifier import HintClassifier

__all__ = ["Hints"]


class Hints:
    """Not for two threads at once. `problem`: '' or why a restored one has a classifier that learns anew."""

    def __init__(self, book: HintBook | None = None, classifier: HintClassifier | None = None, spread: HintSpread | None = None) -> None:
        self.book = HintBook() if book is None else book  # an empty book may hold sources' records
        self.classifier = HintClassifier() if classifier is None else classifier
        self.spread = HintSpread() if spread is None else spread
        self.problem = ""
        self.book.on_settled = self.classifier.settled

    def take(self, hint: Hint, now_s: float, forecast_per_s: Callable[[str], float]) -> str:
        """Takes in a hint that names its model, with the classifier's chance where that is in force; says what it was (`HintBook.add`).

        `forecast_per_s(model)` is the forecast rate of its next use without this hint, NaN where there is none.
        """
        if hint.until_s > now_s and not self.book.has_seen(hint.hint_id):
            chance = self.classifier.chance(hint, self.book.belief(hint.source), forecast_per_s(hint.model))
            hint = hint if chance is None else replace(hint, chance=chance)
        return self.book.add(hint, now_s)

    def take_unnamed(self, hint: Hint, now_s: float, may: Callable[[str], bool]) -> dict[str, str]:
        """Takes in a hint without a model as one of each likely model that `may` be brought, under a source of their own: most of them are
        not meant. By model, what it was."""
        if hint.until_s <= now_s:
            return {}
        likely = self.spread.hinted(hint.hint_id, hint.source, hint.surface, hint.user or hint.session, hint.given_s, hint.until_s)
        source = f"{hint.source} (no model)"
        return {
            model: self.book.add(replace(hint, hint_id=f"{hint.hint_id}/{model}", model=model, source=source, chance=chance), now_s)
            for model, chance in likely
            if may(model)
        }

    def saw(self, model: str, user: str | None, ts: float) -> int:
        """A row: how many open hints it kept."""
        kept = self.book.used(model, ts)
        self.classifier.saw(model, user, ts)
        self.spread.saw(model, user, ts)
        return kept

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {**self.book.snapshot(), "classifier": self.classifier.snapshot(), "likely": self.spread.snapshot()}

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> Hints:
        """What `snapshot` was taken of; a classifier of another kind learns anew.

        Raises KeyError, TypeError or ValueError for what is none.
        """
        problem = ""
        try:
            classifier = HintClassifier.restore(snapshot["classifier"]) if "classifier" in snapshot else HintClassifier()
        except PredictorError as exc:
            classifier, problem = HintClassifier(), str(exc)
        spread = HintSpread.restore(snapshot["likely"]) if "likely" in snapshot else HintSpread()
        made = cls(HintBook.restore(snapshot), classifier, spread)
        made.problem = problem
        return made
