"""What a node has to tell of its ledger's sums: which changed since it told last, and what the state store shows of them.

Sums go into the outcomes topic first and are shown once they are there, so that what people see can be added up again from the topic. A sum
travels whole whenever it changed, so that any later one makes up for one that was lost. Covers no sending (`telling`) and no ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from prefetcher.controller import records
from prefetcher.core.held import HeldEntry
from prefetcher.core.ledger import Ledger, Sum
from prefetcher.core.types import NodeName
from prefetcher.report.sums import HourPart, LedgerPart, StoredLedger, encode_hour

__all__ = ["HOURS_KEPT", "SumsState", "ToTell", "Told"]

#: Real seconds between tellings while something changes, and while only time passes: what is held and idle goes on growing.
_EVERY_S = 10.0
_IDLE_S = 60.0
#: Sums in one message: some 150 kB, where brokers take 1 MB.
_AT_ONCE = 400
#: Hours that the state store shows after they changed last: eight days; those before are in the parquet history.
HOURS_KEPT = 192
_HOUR_S = 3600.0


class SumsState(msgspec.Struct):
    """What outlives an agent's process beside its ledger."""

    since_s: float
    hours: list[tuple[int, int, int]] = []


@dataclass(frozen=True, slots=True)
class ToTell:
    """`parts` for the topic, and what the state store then shows: `ledger`, once it has a number, and its `hours` by key."""

    parts: Sequence[LedgerPart]
    ledger: StoredLedger
    hours: dict[str, bytes]
    sums: Sequence[Sum]
    held: dict[tuple[str, str, str], HeldEntry]
    slots: dict[int, dict[int, int]]


@dataclass(slots=True)
class Told:
    """What was told, in the agent's loop alone. `since_s` is when the ledger began to count."""

    node: NodeName
    since_s: float
    #: By hour and part, the hour in which it was written.
    _hours: dict[HourPart, int] = field(default_factory=dict)
    _held: dict[tuple[str, str, str], HeldEntry] | None = None
    _slots: dict[int, dict[int, int]] = field(default_factory=dict)
    _at_s: float = float("-inf")

    def state(self) -> SumsState:
        return SumsState(self.since_s, self._listed())

    def _listed(self) -> list[tuple[int, int, int]]:
        return [(hour, part, written) for (hour, part), written in sorted(self._hours.items())]

    def restore(self, state: SumsState) -> None:
        self.since_s, self._held, self._slots = state.since_s, None, {}
        self._hours = {(hour, part): written for hour, part, written in state.hours}

    def to_tell(self, ledger: Ledger, held: Sequence[HeldEntry], now_s: float, real_s: float, last: bool = False) -> ToTell | None:
        """What is to be told at `now_s`; None while it can wait. `real_s`: seconds of the machine's steady clock."""
        sums = ledger.changed_sums()
        now_held = {entry.place: entry for entry in held}
        before = self._held or {}
        changed = [entry for place, entry in now_held.items() if before.get(place) != entry]
        gone = [place for place in before if place not in now_held]
        slots = {slot: dict(bins) for slot, bins in ledger.slots().items()}
        new_slots = {slot: bins for slot, bins in slots.items() if self._slots.get(slot) != bins}
        wait_s = _EVERY_S if sums or changed or gone or new_slots else _IDLE_S
        if not last and real_s - self._at_s < wait_s:
            return None
        self._at_s = real_s
        whole = self._held is None
        rows = [(each.part, each.key, each.totals) for each in sums]
        parts = [LedgerPart(now_s, self.since_s, rows[:_AT_ONCE], changed, [] if whole else gone, whole, new_slots)]
        parts += [LedgerPart(now_s, self.since_s, rows[i : i + _AT_ONCE]) for i in range(_AT_ONCE, len(rows), _AT_ONCE)]
        this = int(now_s // _HOUR_S)
        changed_hours = sorted({(each.key.hour, each.part) for each in sums})
        self._hours |= dict.fromkeys(changed_hours, this)
        self._hours = {each: written for each, written in self._hours.items() if written >= this - HOURS_KEPT}
        hours = {records.hour_key(self.node, hour, part): encode_hour(ledger.hour(hour)) for hour, part in changed_hours}
        shown = StoredLedger(now_s, self.since_s, 0, list(held), slots, self._listed())
        return ToTell(parts, shown, hours, sums, now_held, slots)

    def settle(self, told: ToTell, ledger: Ledger, written: bool) -> None:
        """Says what became of it; what was not told and shown comes with the next one."""
        if written:
            ledger.sums_told(told.sums)
            self._held, self._slots = told.held, told.slots
        else:
            self._at_s = float("-inf")
