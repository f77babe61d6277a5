"""Memory by the hour: what a residency held, left idle, wasted and had ready too early, in each hour that it lay in.

One rule for what was given back and for what is still held: the latter counts as if it were given back at the time that is asked about. So
an hour's idle memory may still shrink while its weights are held (a use later on makes use of the time before), and is settled when they
leave. Covers no totals (`core.ledger`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from prefetcher.core.totals import HOUR_S, Totals, TotalsKey, add_amounts
from prefetcher.core.types import Arm, Cause, ModelName, ModelVersion

__all__ = ["HeldEntry", "add_memory", "by_hour", "provisional"]


class HeldEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory that a copy of weights takes, from `start_s` on.

    `last_use_s` is None before the first; `in_use`: leased or waited for, so used until now. `guessed`: a prefetch brought it that no
    person asked for. `early_from_s`: it is the prefetch of an order that is ready since then and not used. The others as in `TotalsKey`.
    """

    model: ModelName
    version: ModelVersion
    tier: str
    cause: Cause
    arm: Arm
    bytes: int
    start_s: float
    last_use_s: float | None = None
    in_use: bool = False
    guessed: bool = False
    early_from_s: float | None = None
    predictor: str = ""
    source: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """One copy at a time lies there: model, version, tier."""
        return self.model, self.version, self.tier

    def memory(self, until_s: float, hours: range | None = None) -> Iterator[tuple[TotalsKey, dict[str, float]]]:
        """By key of each hour of `hours` (None: all), what `Totals` gain by this memory if it is given back at `until_s`."""
        last_s = until_s if self.in_use else self.last_use_s
        idle_from_s = self.start_s if last_s is None else last_s
        wasted = self.guessed and last_s is None
        idle, early = dict(by_hour(idle_from_s, until_s, hours)), {}
        if self.early_from_s is not None and last_s is None:
            early = dict(by_hour(self.early_from_s, until_s, hours))
        for hour, seconds in by_hour(self.start_s, until_s, hours):
            amounts = {"held_byte_s": self.bytes * seconds}
            if hour in idle:
                amounts["idle_byte_s"] = self.bytes * idle[hour]
                if wasted:
                    amounts["wasted_byte_s"] = self.bytes * idle[hour]
            if hour in early:
                amounts["early_byte_s"] = self.bytes * early[hour]
            yield self._key(hour), amounts

    def _key(self, hour: int) -> TotalsKey:
        return TotalsKey(self.model, self.cause, self.arm, hour, self.tier, self.predictor, self.source)


def by_hour(start_s: float, end_s: float, hours: range | None = None) -> Iterator[tuple[int, float]]:
    """The hours that [start_s, end_s) lies in, with the seconds of each, of `hours` alone where those are given; nothing where it is
    empty."""
    at_s = start_s
    if hours is not None:
        at_s, end_s = max(start_s, hours.start * HOUR_S), min(end_s, hours.stop * HOUR_S)
    while at_s < end_s:
        hour = int(at_s // HOUR_S)
        next_s = min((hour + 1) * HOUR_S, end_s)
        yield hour, next_s - at_s
        at_s = next_s


def add_memory(add: Callable[..., None], key: TotalsKey, what: str, start_s: float, end_s: float, size_bytes: int) -> None:
    """Tells `add(key, what=byte-seconds)` of each hour that [start_s, end_s) lies in; `key` names everything but the hour."""
    for hour, seconds in by_hour(start_s, end_s):
        add(key._replace(hour=hour), **{what: size_bytes * seconds})


def provisional(held: Iterable[HeldEntry], at_s: float, hours: range | None = None) -> dict[TotalsKey, Totals]:
    """What memory that is still held adds to the sums of each key, as of `at_s`, in `hours` (None: all)."""
    sums: dict[TotalsKey, Totals] = {}
    for entry in held:
        for key, amounts in entry.memory(at_s, hours):
            add_amounts(sums.setdefault(key, Totals()), amounts)
    return sums
