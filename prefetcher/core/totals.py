"""What a ledger adds up: keys, the sums under them, and how sums are put together.

Covers no facts (`core.ledger`) and nothing of how sums are told or shown. Sizes are bytes, memory byte-seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from prefetcher.core.facts import Found
from prefetcher.core.types import Arm, Cause, ModelName, Outcome

__all__ = ["HOUR_S", "Totals", "TotalsKey", "add_amounts", "sum_totals"]

HOUR_S = 3600.0
#: Outcomes that say nothing about how well was guessed.
_UNJUDGED = (Outcome.OPEN, Outcome.SUPERSEDED, Outcome.CANCELLED)


class TotalsKey(NamedTuple):
    """Orders count in the hour (since 1970) of their issue, rows in that of their arrival, transfers in that of their end, memory in each
    hour that it was held in.

    `tier` is '' for rows (`Totals.served` says where they were served from) and stages. `predictor` is the largest contribution of the
    order behind it, `source` who gave the hint or schedule, `tenant` for whom a row was; '' where nothing names one.
    """

    model: ModelName
    cause: Cause
    arm: Arm
    hour: int
    tier: str = ""
    predictor: str = ""
    source: str = ""
    tenant: str = ""


class Totals(msgspec.Struct, omit_defaults=True):
    """Sums over one key. `wait_s` sums over all rows, `cold_starts` are rows that found nothing resident, moving or queued.

    Memory is that of HOST and above. What a person loaded or pinned (`manual`) is never wasted: nobody guessed. `waits` and `first_waits`
    are bins of `core.histogram`; `served` counts rows by the tier that served them; stages of cold starts are `stage_s` in all, and
    `stage_bins` by `STAGE:BIN`.
    """

    orders: int = 0
    outcomes: dict[Outcome, int] = msgspec.field(default_factory=dict)
    premature: int = 0
    redundant: int = 0
    saved_s: float = 0.0
    early_byte_s: float = 0.0
    wasted_moved_bytes: int = 0
    moved_bytes: int = 0
    held_byte_s: float = 0.0
    idle_byte_s: float = 0.0
    wasted_byte_s: float = 0.0
    rows: int = 0
    found: dict[Found, int] = msgspec.field(default_factory=dict)
    bypassed: int = 0
    dropped: int = 0
    wait_s: float = 0.0
    leases: int = 0
    lease_wait_s: float = 0.0
    waits: dict[int, int] = msgspec.field(default_factory=dict)
    first_waits: dict[int, int] = msgspec.field(default_factory=dict)
    served: dict[str, int] = msgspec.field(default_factory=dict)
    served_wait_s: dict[str, float] = msgspec.field(default_factory=dict)
    stage_s: dict[str, float] = msgspec.field(default_factory=dict)
    stage_bins: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def cold_starts(self) -> int:
        return self.found.get(Found.ABSENT, 0)

    @property
    def accuracy(self) -> float | None:
        """The share of judged prefetches that were used; None before there is one."""
        judged = sum(n for outcome, n in self.outcomes.items() if outcome not in _UNJUDGED)
        return self._used / judged if judged else None

    @property
    def timeliness(self) -> float | None:
        """The share of used prefetches that were ready in time; None before there is one."""
        return self.outcomes.get(Outcome.TIMELY, 0) / self._used if self._used else None

    @property
    def _used(self) -> int:
        return self.outcomes.get(Outcome.TIMELY, 0) + self.outcomes.get(Outcome.LATE, 0)


def add_amounts(totals: Totals, amounts: Mapping[str, Any]) -> None:
    """Adds to fields by their names; counts by name are added one by one."""
    for name, amount in amounts.items():
        if isinstance(amount, dict):
            counts = getattr(totals, name)
            for key, count in amount.items():
                counts[key] = counts.get(key, 0) + count
        else:
            setattr(totals, name, getattr(totals, name) + amount)


_COUNTS = tuple(name for name in Totals.__struct_fields__ if isinstance(getattr(Totals(), name), dict))
_NUMBERS = tuple(name for name in Totals.__struct_fields__ if name not in _COUNTS)
_counts_of, _numbers_of = attrgetter(*_COUNTS), attrgetter(*_NUMBERS)


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """One `Totals` over many, which are added in their order."""
    several = list(parts)
    if not several:
        return Totals()
    total = Totals()
    for name, numbers in zip(_NUMBERS, zip(*map(_numbers_of, several), strict=True), strict=True):
        setattr(total, name, sum(numbers))
    counts = _counts_of(total)
    for part in several:
        for mine, more in zip(counts, _counts_of(part), strict=True):
            if more:
                for key, count in more.items():
                    mine[key] = mine.get(key, 0) + count
    return total
