"""What a node told of its ledger: parts as they travel in the outcomes topic, records as the state store has them, and a node's sums again.

A part says which sums changed, each as a whole, and what is held now. Whoever takes in every part, in any order and any number of times,
has the same sums as the node; the state store has them as well, put there after the topic had them. Covers no ledger (`core.ledger`), no
report (`report.build`) and no reading of either place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import msgspec

from prefetcher.core.held import HeldEntry, provisional
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey, sum_totals

__all__ = ["FORMAT", "HourPart", "LedgerPart", "NodeSums", "StoredLedger", "decode_hour", "decode_ledger", "encode_hour"]

#: Of parts and of records; a reader takes every format up to its own.
FORMAT = 1
#: An hour since 1970, and which part of it.
HourPart = tuple[int, int]
Place = tuple[str, str, str]


class LedgerPart(msgspec.Struct, omit_defaults=True):
    """What changed in a node's ledger up to `at_s`.

    `sums`: (part of the hour, key, sums), each in the place of what was told of it before. `held`: what is held, where that changed;
    `gone`: model, version and tier of what is not held any more; with `whole`, `held` is all that is. `slots`: waits of first requests by
    slot (`core.ledger.SLOT_S`), each whole. `since_s`: the ledger knows nothing of the time before.
    """

    at_s: float
    since_s: float
    sums: list[tuple[int, TotalsKey, Totals]] = []
    held: list[HeldEntry] = []
    gone: list[Place] = []
    whole: bool = False
    slots: dict[int, dict[int, int]] = {}
    format: int = FORMAT


class StoredLedger(msgspec.Struct, omit_defaults=True):
    """The record under a node's `sums` key: all but the hours, which are under keys of their own. `hours`: which there are, and the hour in
    which each was written last."""

    at_s: float
    since_s: float
    seq: int
    held: list[HeldEntry] = []
    slots: dict[int, dict[int, int]] = {}
    hours: list[tuple[int, int, int]] = []
    format: int = FORMAT


_first = itemgetter(0)
_ledgers = msgspec.json.Decoder(StoredLedger)
_hours = msgspec.json.Decoder(list[tuple[TotalsKey, Totals]])
#: Times that are none (the year 5138), and memory that nobody holds for so long, would take for ever to be split by hours.
_LAST_S = 1e11
_LONGEST_HELD_S = 10 * 366 * 86_400.0
#: No hour of a node is larger; what is was made to be.
_MOST_BYTES = 256_000_000


def decode_ledger(raw: bytes) -> StoredLedger:
    """The record under a node's `sums` key. Raises ValueError where it is something else, or of a newer format."""
    try:
        stored = _ledgers.decode(raw)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    if stored.format > FORMAT:
        raise ValueError(f"format {stored.format}, this program reads up to {FORMAT}")
    if stored.seq < 0:
        raise ValueError(f"seq is a whole number from 0, found {stored.seq}")
    _check_times(stored)
    wrong = next((hour for hour, _, _ in stored.hours if not 0 <= hour <= _LAST_S / HOUR_S), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is no hour since 1970")
    return stored


def _check_times(told: LedgerPart | StoredLedger) -> None:
    """Raises ValueError for times that can't be, and for memory of less than nothing."""
    for what, at_s in (("at_s", told.at_s), ("since_s", told.since_s)):
        if not 0.0 <= at_s <= _LAST_S:
            raise ValueError(f"{what} is in seconds since 1970, found {at_s:g}")
    for entry in told.held:
        if not told.at_s - _LONGEST_HELD_S <= entry.start_s <= _LAST_S or entry.bytes < 0:
            raise ValueError(f"{entry.bytes} bytes held since {entry.start_s:g}, as of {told.at_s:.0f}")


def encode_hour(sums: Iterable[tuple[TotalsKey, Totals]]) -> bytes:
    """All sums of a part of an hour, packed."""
    return zlib.compress(msgspec.json.encode(list(sums)), 1)


def decode_hour(raw: bytes) -> list[tuple[TotalsKey, Totals]]:
    """What `encode_hour` packed. Raises ValueError where it is something else."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(raw, _MOST_BYTES)
        if not unpacker.eof:
            raise ValueError("an hour of a ledger that is cut off, or too large")
        return _hours.decode(text)
    except (zlib.error, RecursionError) as exc:
        raise ValueError(f"no hour of a ledger: {exc}") from exc


@dataclass(slots=True)
class NodeSums:
    """The sums of one node as it told them, `at_s`, with its part number `seq`."""

    node: str
    at_s: float = 0.0
    since_s: float = float("inf")
    seq: int = -1
    sums: dict[tuple[int, TotalsKey], Totals] = field(default_factory=dict)
    held: dict[Place, HeldEntry] = field(default_factory=dict)
    slots: dict[int, dict[int, int]] = field(default_factory=dict)
    _sum_seq: dict[tuple[int, TotalsKey], int] = field(default_factory=dict)
    _held_seq: dict[Place, int] = field(default_factory=dict)
    _slot_seq: dict[int, int] = field(default_factory=dict)
    _whole_seq: int = -1

    def take(self, seq: int, part: LedgerPart) -> None:
        """Takes in the part that was told as number `seq`: in any order, and any number of times.

        Raises ValueError for a part of a newer format, or of times that can't be.
        """
        if part.format > FORMAT:
            raise ValueError(f"too_new: a part of a ledger in format {part.format}, this program reads up to {FORMAT}")
        _check_times(part)
        if seq > self.seq:
            self.seq, self.at_s = seq, part.at_s
        self.since_s = min(self.since_s, part.since_s)
        for number, key, totals in part.sums:
            if seq >= self._sum_seq.get((number, key), seq):
                self.sums[number, key], self._sum_seq[number, key] = totals, seq
        if part.whole:
            self._whole_seq = max(self._whole_seq, seq)
            for place in [place for place, of in self._held_seq.items() if of < seq]:
                self.held.pop(place, None)
        for entry in part.held:
            if seq >= max(self._held_seq.get(entry.place, seq), self._whole_seq):
                self.held[entry.place], self._held_seq[entry.place] = entry, seq
        for place in part.gone:
            if seq >= self._held_seq.get(place, seq):
                self.held.pop(place, None)
                self._held_seq[place] = seq
        for slot, bins in part.slots.items():
            if seq >= self._slot_seq.get(slot, seq):
                self.slots[slot], self._slot_seq[slot] = bins, seq

    def by_key(self, hours: range | None = None) -> dict[TotalsKey, Totals]:
        """Sums by key, parts of an hour added up and what is held added, for `hours` (None: all). In the order of keys, so that the same
        parts always make the same figures."""
        parts: dict[TotalsKey, list[Totals]] = {}
        for (_, key), totals in sorted(self.sums.items(), key=_first):
            if hours is None or key.hour in hours:
                parts.setdefault(key, []).append(totals)
        held = sorted(self.held.values(), key=lambda entry: entry.place)
        for key, totals in provisional(held, self.at_s, hours).items():
            parts.setdefault(key, []).append(totals)
        return {key: found[0] if len(found) == 1 else sum_totals(found) for key, found in sorted(parts.items(), key=_first)}

    @classmethod
    def stored(cls, node: str, ledger: StoredLedger, hours: Mapping[HourPart, Iterable[tuple[TotalsKey, Totals]]]) -> NodeSums:
        """The sums as the state store has them."""
        made = cls(node, ledger.at_s, ledger.since_s, ledger.seq, slots=ledger.slots)
        made.held = {entry.place: entry for entry in ledger.held}
        for (_, number), sums in hours.items():
            made.sums.update({(number, key): totals for key, totals in sums})
        return made
