"""What became of every prefetch, and what waiting and memory it cost: facts in, records and totals out.

Fed with `core.facts` in the order in which they happened; pure. A record is closed, and handed out to be kept elsewhere, once nothing can
change it any more, so that memory stays bounded by what is open. Totals are kept twice: by model, cause, arm and hour for as long as hours
are kept, and by cause and arm for ever. Times are seconds since 1970-01-01 UTC, sizes bytes; byte-seconds over 3.6e12 are GB·h.

Outcomes, with begin b, ready t1, first use u and end e of an order (exactly one each):

| outcome      | when                                              | settled at |
| ------------ | ------------------------------------------------- | ---------- |
| `timely`     | t1 <= u                                           | u          |
| `late`       | b <= u < t1                                       | t1         |
| `useless`    | ready, given up unused for any reason but room    | e          |
| `displaced`  | ready, evicted unused to make room                | e          |
| `superseded` | ended before bytes moved                          | e          |
| `cancelled`  | stopped after bytes moved and before ready        | e          |
| `failed`     | the load failed                                   | e          |
| `lost`       | the node, or its agent's process, is gone         | e          |

A row that is heard of late may make an order `late` when it is ready already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from prefetcher.core import facts
from prefetcher.core.facts import Ending, Fact, Found
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, Order, Outcome, Tier
from prefetcher.errors import InputError

__all__ = ["Ledger", "OrderEntry", "Totals", "TotalsKey", "outcome_of", "sum_totals"]

_FORMAT = 1
_HOUR_S = 3600.0

_BY_ENDING = {
    Ending.GIVEN_UP: Outcome.USELESS,
    Ending.DISPLACED: Outcome.DISPLACED,
    Ending.REPLACED: Outcome.SUPERSEDED,
    Ending.CANCELLED: Outcome.CANCELLED,
    Ending.FAILED: Outcome.FAILED,
    Ending.LOST: Outcome.LOST,
}
#: Outcomes that say nothing about how well was guessed.
_UNJUDGED = (Outcome.OPEN, Outcome.SUPERSEDED, Outcome.CANCELLED)


@dataclass(slots=True)
class OrderEntry:
    """One order's record. `moved_bytes` were moved for it, in `moving_s`; flags are None while they can't be known."""

    order: Order
    bytes: int
    begin_s: float | None = None
    ready_s: float | None = None
    first_use_s: float | None = None
    end_s: float | None = None
    ending: Ending | None = None
    reason: str = ""
    moved_bytes: int = 0
    moving_s: float = 0.0
    premature: bool = False
    redundant: bool | None = None

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.ready_s, self.first_use_s, self.ending)

    @property
    def early_s(self) -> float:
        """How long it was ready before its first use, or its end."""
        until_s = self.first_use_s if self.first_use_s is not None else self.end_s
        return 0.0 if self.ready_s is None or until_s is None else max(0.0, until_s - self.ready_s)

    @property
    def saved_s(self) -> float:
        """How long its bytes had moved before somebody wanted them: that much less was waited for. 0 unless it was used."""
        if self.ready_s is None or self.first_use_s is None:
            return 0.0
        return max(0.0, self.moving_s - max(0.0, self.ready_s - self.first_use_s))


def outcome_of(ready_s: float | None, first_use_s: float | None, ending: Ending | None) -> Outcome:
    """The one outcome of an order, as the table above says."""
    if ready_s is not None and first_use_s is not None:
        return Outcome.TIMELY if ready_s <= first_use_s else Outcome.LATE
    return Outcome.OPEN if ending is None else _BY_ENDING[ending]


@dataclass(frozen=True, slots=True, order=True)
class TotalsKey:
    """Orders count in the hour of their issue, rows in that of their arrival, transfers and memory in that of their end."""

    model: ModelName
    cause: Cause
    arm: Arm
    hour: int


def _key(model: ModelName, cause: Cause, arm: Arm, at_s: float) -> TotalsKey:
    return TotalsKey(model, cause, arm, int(at_s // _HOUR_S))


class Totals(msgspec.Struct, omit_defaults=True):
    """Sums over one key. `wait_s` sums over all rows, `cold_starts` are rows that found nothing resident, moving or queued.

    Memory is that of HOST and above. What a person loaded or pinned (`manual`) is never wasted: nobody guessed.
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


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """One `Totals` over many."""
    total = Totals()
    for part in parts:
        for name in Totals.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, dict):
                _count(getattr(total, name), value)
            else:
                setattr(total, name, getattr(total, name) + value)
    return total


def _count(counts: dict[Any, int], more: dict[Any, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _memory(fact: facts.ResidencyEnded) -> tuple[float, float, float]:
    """Byte-seconds held, idle, and wasted."""
    idle_from_s = fact.last_use_s if fact.last_use_s is not None else fact.start_s
    idle = fact.bytes * (fact.end_s - idle_from_s)
    guessed = fact.decision_id is not None and fact.cause is not Cause.MANUAL
    return fact.bytes * (fact.end_s - fact.start_s), idle, idle if guessed and fact.last_use_s is None else 0.0


class _State(msgspec.Struct):
    format: int
    open: list[OrderEntry]
    closed: list[OrderEntry]
    changed: list[DecisionId]
    hours: list[list[tuple[TotalsKey, Totals]]]
    lifetime: list[tuple[Cause, Arm, Totals]]


class _Encoded(msgspec.Struct):
    """`_State` with hours that are JSON already."""

    format: int
    open: list[OrderEntry]
    closed: list[OrderEntry]
    changed: list[DecisionId]
    hours: list[msgspec.Raw]
    lifetime: list[tuple[Cause, Arm, Totals]]


class Ledger:
    """Adds facts up. Totals of hours that are older than `keep_hours` are handed out by `take_old_totals`."""

    def __init__(self, *, keep_hours: int = 48) -> None:
        self._keep_hours = keep_hours
        self._open: dict[str, OrderEntry] = {}
        #: Ended, and not handed out yet; those that ended unused may still turn out premature.
        self._closed: dict[str, OrderEntry] = {}
        self._watched: dict[str, dict[str, None]] = {}
        self._changed: dict[DecisionId, None] = {}
        self._totals: dict[int, dict[TotalsKey, Totals]] = {}
        #: Hours as JSON; what is over hardly changes any more.
        self._as_json: dict[int, msgspec.Raw] = {}
        self._lifetime: dict[tuple[Cause, Arm], Totals] = {}

    # --- in ---

    def record(self, fact: Fact, *, arm: Arm = Arm.TREATED) -> list[OrderEntry]:
        """Takes a fact in. `arm` is the node's at the time: demand has no order that carries it.

        Returns the orders whose outcomes this settled. Facts about orders that are not open (never seen, or ended) change nothing.
        """
        match fact:
            case facts.OrderIssued(order, size):
                if order.decision_id not in self._open and order.decision_id not in self._closed:
                    self._open[order.decision_id] = entry = OrderEntry(order, size)
                    self._add(self._of_order(entry), orders=1)
                    self._changed[order.decision_id] = None
            case facts.OrderBegan(decision_id, at_s):
                if (begun := self._open.get(decision_id)) is not None and begun.begin_s is None:
                    begun.begin_s = at_s
                    self._changed[decision_id] = None
            case facts.OrderReady(decision_id, at_s):
                return self._ready(decision_id, at_s)
            case facts.OrderUsed(decision_id, at_s):
                return self._used(decision_id, at_s)
            case facts.OrderEnded(decision_id, at_s, ending, reason):
                ended = self._open.get(decision_id)
                return self._end(ended, at_s, ending, reason) if ended is not None else []
            case facts.OrderRedundant(decision_id, redundant):
                self._redundant(decision_id, redundant)
            case facts.NodeLost(node, at_s):
                there = [entry for entry in self._open.values() if entry.order.node == node]
                return [settled for entry in there for settled in self._end(entry, at_s, Ending.LOST, "node_lost")]
            case facts.RowSeen():
                self._row_seen(fact, arm)
            case facts.RowServed():
                self._row_served(fact, arm)
            case facts.TransferEnded():
                self._transfer(fact, arm)
            case facts.ResidencyEnded():
                self._residency(fact, arm)
        return []

    def _ready(self, decision_id: DecisionId, at_s: float) -> list[OrderEntry]:
        entry = self._open.get(decision_id)
        if entry is None or entry.ready_s is not None:
            return []
        entry.ready_s = at_s
        self._changed[decision_id] = None
        return self._settle(entry) if entry.first_use_s is not None else []

    def _used(self, decision_id: DecisionId, at_s: float) -> list[OrderEntry]:
        entry = self._open.get(decision_id)
        if entry is None or entry.first_use_s is not None:
            return []
        entry.first_use_s = at_s
        self._changed[decision_id] = None
        return self._settle(entry) if entry.ready_s is not None else []

    def _settle(self, entry: OrderEntry) -> list[OrderEntry]:
        self._add(
            self._of_order(entry),
            outcomes={entry.outcome: 1},
            early_byte_s=entry.bytes * entry.early_s,
            saved_s=entry.saved_s,
        )
        return [entry]

    def _end(self, entry: OrderEntry, at_s: float, ending: Ending, reason: str) -> list[OrderEntry]:
        settled = entry.outcome is not Outcome.OPEN
        entry.end_s, entry.ending, entry.reason = at_s, ending, reason
        decision_id = entry.order.decision_id
        del self._open[decision_id]
        self._closed[decision_id] = entry
        self._changed[decision_id] = None
        if entry.outcome not in (Outcome.TIMELY, Outcome.LATE):
            self._add(self._of_order(entry), wasted_moved_bytes=entry.moved_bytes)
        if entry.outcome in (Outcome.USELESS, Outcome.DISPLACED):
            self._watched.setdefault(entry.order.key.model, {})[decision_id] = None
        return [] if settled else self._settle(entry)

    def _redundant(self, decision_id: DecisionId, redundant: bool) -> None:
        entry = self._open.get(decision_id) or self._closed.get(decision_id)
        if entry is not None and entry.redundant is None:
            entry.redundant = redundant
            self._changed[decision_id] = None
            self._add(self._of_order(entry), redundant=int(redundant))

    def _row_seen(self, fact: facts.RowSeen, arm: Arm) -> None:
        key = _key(fact.model, Cause.DEMAND, arm, fact.ts)
        if fact.lease:
            self._add(key, leases=1)
        if fact.is_row:
            self._add(key, rows=1, found={fact.found: 1})
        for decision_id in self._watched.get(fact.model, ()):
            entry = self._closed[decision_id]
            assert entry.end_s is not None
            if not entry.premature and entry.end_s <= fact.ts <= entry.end_s + entry.order.hold_s:
                entry.premature = True
                self._changed[entry.order.decision_id] = None
                self._add(self._of_order(entry), premature=1)

    def _row_served(self, fact: facts.RowServed, arm: Arm) -> None:
        key = _key(fact.model, Cause.DEMAND, arm, fact.ts)
        if fact.lease:
            self._add(key, lease_wait_s=fact.wait_s)
        if fact.is_row:
            self._add(key, wait_s=fact.wait_s, bypassed=int(fact.bypass), dropped=int(fact.dropped))

    def _transfer(self, fact: facts.TransferEnded, arm: Arm) -> None:
        entry = self._open.get(fact.decision_id) if fact.decision_id is not None else None
        if entry is not None:
            entry.moved_bytes += fact.bytes
            entry.moving_s += fact.end_s - fact.start_s
        self._add(_key(fact.key.model, fact.cause, self._arm(fact.decision_id, arm), fact.end_s), moved_bytes=fact.bytes)

    def _residency(self, fact: facts.ResidencyEnded, arm: Arm) -> None:
        if fact.tier < Tier.HOST:
            return
        held, idle, wasted = _memory(fact)
        key = _key(fact.key.model, fact.cause, self._arm(fact.decision_id, arm), fact.end_s)
        self._add(key, held_byte_s=held, idle_byte_s=idle, wasted_byte_s=wasted)

    def _arm(self, decision_id: DecisionId | None, arm: Arm) -> Arm:
        entry = None if decision_id is None else self._open.get(decision_id) or self._closed.get(decision_id)
        return arm if entry is None else entry.order.arm

    def _of_order(self, entry: OrderEntry) -> TotalsKey:
        order = entry.order
        return _key(order.key.model, order.cause, order.arm, order.issued_s)

    def _add(self, key: TotalsKey, **amounts: Any) -> None:
        """Adds to the hour and to the lifetime; nothing is ever taken away again."""
        hour = self._totals.setdefault(key.hour, {}).setdefault(key, Totals())
        self._as_json.pop(key.hour, None)
        ever = self._lifetime.setdefault((key.cause, key.arm), Totals())
        for totals in (hour, ever):
            for name, amount in amounts.items():
                if isinstance(amount, dict):
                    _count(getattr(totals, name), amount)
                else:
                    setattr(totals, name, getattr(totals, name) + amount)

    # --- out ---

    def open_orders(self) -> list[OrderEntry]:
        """Orders that have not ended, oldest first; their outcome may be settled already."""
        return list(self._open.values())

    def take_changed(self) -> list[OrderEntry]:
        """Orders that are new or changed since the last call, each once as it stands, in the order of their last change."""
        entries = [self._open.get(decision_id) or self._closed.get(decision_id) for decision_id in self._changed]
        self._changed = {}
        return [entry for entry in entries if entry is not None]

    def take_closed(self, now_s: float) -> list[OrderEntry]:
        """Records that nothing changes any more, each handed out once, in the order in which they ended."""
        final = [decision_id for decision_id, entry in self._closed.items() if not self._may_change(entry, now_s)]
        taken = []
        for decision_id in final:
            entry = self._closed.pop(decision_id)
            watched = self._watched.get(entry.order.key.model)
            if watched is not None and decision_id in watched:
                del watched[decision_id]
                if not watched:
                    del self._watched[entry.order.key.model]
            self._changed.pop(entry.order.decision_id, None)
            taken.append(entry)
        return taken

    def _may_change(self, entry: OrderEntry, now_s: float) -> bool:
        """An unused prefetch is premature when its weights are asked for within one hold after its end."""
        if entry.outcome not in (Outcome.USELESS, Outcome.DISPLACED) or entry.premature:
            return False
        return entry.end_s is not None and now_s <= entry.end_s + entry.order.hold_s

    def totals(self) -> dict[TotalsKey, Totals]:
        """All totals that were not handed out, by key."""
        return {key: totals for hour in self._totals.values() for key, totals in hour.items()}

    def lifetime(self, held: Iterable[facts.ResidencyEnded] = (), *, arm: Arm = Arm.TREATED) -> dict[tuple[Cause, Arm], Totals]:
        """All that was ever added up, by cause and arm; memory that is still held counts as if each of `held` ended now."""
        sums = {key: sum_totals([totals]) for key, totals in self._lifetime.items()}
        for fact in held:
            if fact.tier < Tier.HOST:
                continue
            totals = sums.setdefault((fact.cause, self._arm(fact.decision_id, arm)), Totals())
            held_byte_s, idle, wasted = _memory(fact)
            totals.held_byte_s += held_byte_s
            totals.idle_byte_s += idle
            totals.wasted_byte_s += wasted
            entry = self._open.get(fact.decision_id) if fact.decision_id is not None else None
            if entry is not None and entry.ready_s is not None and entry.outcome is Outcome.OPEN:
                totals.early_byte_s += entry.bytes * max(0.0, fact.end_s - entry.ready_s)
        return sums

    def take_old_totals(self, now_s: float) -> dict[TotalsKey, Totals]:
        """Totals of hours that are no longer kept, handed out once. An hour that changes later starts a new sum to be added to these."""
        oldest = int(now_s // _HOUR_S) - self._keep_hours
        old: dict[TotalsKey, Totals] = {}
        for hour in [hour for hour in self._totals if hour < oldest]:
            old |= self._totals.pop(hour)
            self._as_json.pop(hour, None)
        return old

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """Everything that `restore` needs; JSON types only."""
        hours = [list(hour.items()) for hour in self._totals.values()]
        state = _State(
            _FORMAT, list(self._open.values()), list(self._closed.values()), list(self._changed), hours, self._by_cause_and_arm()
        )
        built: dict[str, Any] = msgspec.to_builtins(state, str_keys=True)
        return built

    def encoded(self) -> bytes:
        """The snapshot as JSON; takes time for what changed since the last call and for what is open only."""
        for hour, totals in self._totals.items():
            if hour not in self._as_json:
                self._as_json[hour] = msgspec.Raw(msgspec.json.encode(list(totals.items())))
        hours = [self._as_json[hour] for hour in self._totals]
        return msgspec.json.encode(
            _Encoded(_FORMAT, list(self._open.values()), list(self._closed.values()), list(self._changed), hours, self._by_cause_and_arm())
        )

    def _by_cause_and_arm(self) -> list[tuple[Cause, Arm, Totals]]:
        return [(cause, arm, totals) for (cause, arm), totals in self._lifetime.items()]

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from a snapshot. Raises InputError when it is not one."""
        try:
            state = msgspec.convert(snapshot, _State, str_keys=True)
        except msgspec.ValidationError as exc:
            raise InputError(f"not a snapshot of a ledger: {exc}; remove it to start empty") from exc
        if state.format != _FORMAT:
            raise InputError(f"a ledger's snapshot in format {state.format}, expected {_FORMAT}; remove it to start empty")
        self._open = {entry.order.decision_id: entry for entry in state.open}
        self._closed = {entry.order.decision_id: entry for entry in state.closed}
        self._changed = dict.fromkeys(state.changed)
        self._totals = {hour[0][0].hour: dict(hour) for hour in state.hours if hour}
        self._as_json = {}
        self._lifetime = {(cause, arm): totals for cause, arm, totals in state.lifetime}
        self._watched = {}
        for decision_id, entry in self._closed.items():
            if entry.outcome in (Outcome.USELESS, Outcome.DISPLACED):
                self._watched.setdefault(entry.order.key.model, {})[decision_id] = None
