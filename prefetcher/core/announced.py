"""How far hints announce a model's use: the share of its starts that came with one, and how long before. Pure.

Where they announce nearly all, what they have not named is not about to come, and a forecast ahead of them is worth little
(`core.value.beyond_hints`). A start is a row after a minute or more without one of its model. Counts fade with every later start, a model's
own stand before those of all, so that both a new model and a page that stops sending hints are seen soon.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

__all__ = ["Announced"]

_IDLE_S = 60.0
_HALF_LIFE_OF_ALL, _HALF_LIFE_OF_ONE = 200.0, 10.0
_FADE_OF_ALL, _FADE_OF_ONE = 0.5 ** (1.0 / _HALF_LIFE_OF_ALL), 0.5 ** (1.0 / _HALF_LIFE_OF_ONE)
#: So many starts of all models stand behind a model's own, and so many that were not announced behind those of all.
_PRIOR_OF_ONE, _PRIOR_OF_ALL = 4.0, 20.0
#: Models that are counted each for itself, the latest.
_MOST_MODELS = 50_000


class Announced:
    """Counts of starts, of those that were announced, and of seconds of lead; by model, and of all. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._all = [0.0, 0.0, 0.0]
        #: model -> [starts, announced, seconds of lead], discounted, and its last row.
        self._of: OrderedDict[str, list[float]] = OrderedDict()

    def saw(self, model: str, at_s: float, given_s: float | None) -> bool:
        """A row of `model` at `at_s`, announced at `given_s`, or not at all; whether it was a start."""
        own = self._of.setdefault(model, [0.0, 0.0, 0.0, float("-inf")])
        self._of.move_to_end(model)
        before_s, own[3] = own[3], max(own[3], at_s)
        if at_s - before_s < _IDLE_S:
            return False
        for counts, fade in ((self._all, _FADE_OF_ALL), (own, _FADE_OF_ONE)):
            for i, more in enumerate((1.0, float(given_s is not None), 0.0 if given_s is None else at_s - given_s)):
                counts[i] = counts[i] * fade + more
        if len(self._of) > _MOST_MODELS:
            self._of.popitem(last=False)
        return True

    def of(self, model: str) -> tuple[float, float]:
        """The share of the model's next starts that hints announce, and the mean seconds before; 0 and 0 where nothing says so."""
        starts, announced, lead_s = self._all
        share = announced / (starts + _PRIOR_OF_ALL)
        mean_s = lead_s / announced if announced > 0.0 else 0.0
        own = self._of.get(model)
        if own is None:
            return share, mean_s
        own_announced = own[1] + _PRIOR_OF_ONE * share
        own_lead_s = own[2] + _PRIOR_OF_ONE * share * mean_s
        return own_announced / (own[0] + _PRIOR_OF_ONE), own_lead_s / own_announced if own_announced > 0.0 else 0.0

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it; -inf is not among it."""
        return {"all": list(self._all), "of": [[model, *counts] for model, counts in self._of.items()]}

    @classmethod
    def restore(cls, snapshot: Any) -> Announced:
        """What `snapshot` was taken of. Raises KeyError, TypeError or ValueError for something else."""
        made = cls()
        made._all = _numbers(snapshot["all"], 3)
        for model, *counts in snapshot["of"]:
            made._of[str(model)] = _numbers(counts, 4)
        return made


def _numbers(found: Iterable[Any], count: int) -> list[float]:
    numbers = [float(value) for value in found]
    if len(numbers) != count:
        raise ValueError(f"announced: {len(numbers)} numbers, expected {count}")
    return numbers
