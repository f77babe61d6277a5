"""What became of every prefetch, and what waiting and memory it cost: facts in, records and totals out.

Fed with `core.facts` in the order in which they happened; pure. A record is closed, and handed out to be kept elsewhere, once nothing can
change it any more, so that memory stays bounded by what is open. Totals are kept twice: by `TotalsKey` and hour for as long as hours are
kept, and by cause and arm for ever. What outcome an order has, `core.outcomes` says. Times are seconds since 1970-01-01 UTC, sizes bytes;
byte-seconds over 3.6e12 are GB·h.

Orders count in the hour of their issue, rows in that of their arrival, transfers in that of their end; memory in each hour by as much as
was held in it, once it is given back. What is still held is none of the ledger's yet: `held_entries` names it, and `core.held` adds it up
in the same way. A sum only ever grows, so whoever was told a sum replaces the one before. An hour that is no longer kept is handed out;
what changes it later is another part of it (`changed_sums`), to be added to the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from prefetcher.core import facts
from prefetcher.core.facts import Ending, Fact
from prefetcher.core.held import HeldEntry, add_memory
from prefetcher.core.histogram import bin_of
from prefetcher.core.outcomes import OrderEntry, outcome_of
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey, add_amounts, sum_totals
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, Order, Outcome, Tier
from prefetcher.errors import InputError

__all__ = ["FIRST_GAP_S", "SLOT_S", "Ledger", "OrderEntry", "Sum", "Totals", "TotalsKey", "outcome_of", "sum_totals"]

#: 1 had no parts of hours, and nothing of tiers, predictors, sources and tenants.
_FORMAT = 2
#: A request is the first one of its model when none came on this node for so long before: the hold, and the horizon that serves best. A
#: property of traffic alone, so that no policy changes what is counted.
FIRST_GAP_S = 600.0
#: First requests are also counted in slots, for burn rates that look back an hour and six.
SLOT_S = 300.0
_SLOTS_KEPT_S = 7 * HOUR_S
#: Tenants that one ledger tells apart; requests of further ones count as of `others`.
_MOST_TENANTS = 200
_OTHERS = "others"


class Sum(NamedTuple):
    """A sum as it stands: of `part` of the key's hour. `change` is the number of its last change."""

    part: int
    key: TotalsKey
    totals: Totals
    change: int


class _Behind(NamedTuple):
    """What of an order its memory is booked under."""

    arm: Arm
    predictor: str
    source: str


class _State(msgspec.Struct, omit_defaults=True):
    format: int
    open: list[OrderEntry]
    closed: list[OrderEntry]
    changed: list[DecisionId]
    hours: list[list[tuple[TotalsKey, Totals]]]
    lifetime: list[tuple[Cause, Arm, Totals]]
    parts: dict[int, int] = {}
    part: int = 0
    handed_out: int = 0
    untold: list[TotalsKey] = []
    behind: dict[DecisionId, _Behind] = {}
    last_rows: dict[ModelName, float] = {}
    firsts: dict[ModelName, list[float]] = {}
    slots: dict[int, dict[int, int]] = {}
    tenants: list[str] = []


class Ledger:
    """Adds facts up. Totals of hours that are older than `keep_hours` are handed out by `take_old_totals`.

    With `tells`, it knows which sums changed and were not told yet (`changed_sums`, `sums_told`), and keeps their hours until they were.
    """

    def __init__(self, *, keep_hours: int = 48, tells: bool = False) -> None:
        self._keep_hours = keep_hours
        self._tells = tells
        self._open: dict[str, OrderEntry] = {}
        #: Ended, and not handed out yet; those that ended unused may still turn out premature.
        self._closed: dict[str, OrderEntry] = {}
        self._watched: dict[str, dict[str, None]] = {}
        self._changed: dict[DecisionId, None] = {}
        self._totals: dict[int, dict[TotalsKey, Totals]] = {}
        #: Hours as JSON; what is over hardly changes any more.
        self._as_json: dict[int, msgspec.Raw] = {}
        self._lifetime: dict[tuple[Cause, Arm], Totals] = {}
        #: Which part of an hour is kept, where it is not the first; numbers are given once.
        self._parts: dict[int, int] = {}
        self._part = 0
        #: Hours before this one were handed out, if there were any.
        self._handed_out = 0
        #: Sums that changed since they were told, with the number of their last change.
        self._untold: dict[TotalsKey, int] = {}
        self._changes = 0
        #: Orders whose memory is not booked yet.
        self._behind: dict[DecisionId, _Behind] = {}
        self._last_rows: dict[ModelName, float] = {}
        #: First requests that wait.
        self._firsts: dict[ModelName, list[float]] = {}
        self._slots: dict[int, dict[int, int]] = {}
        self._tenants: dict[str, None] = {}

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
                    self._behind[decision_id] = _behind(begun.order)
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
                self._behind.clear()
                return [settled for entry in there for settled in self._end(entry, at_s, Ending.LOST, "node_lost")]
            case facts.RowSeen():
                self._row_seen(fact, arm)
            case facts.RowServed():
                self._row_served(fact, arm)
            case facts.TransferEnded():
                self._transfer(fact, arm)
            case facts.StageEnded(key, stage, end_s, took_s):
                name = f"{stage.value}:{bin_of(took_s)}"
                self._add(_key(key.model, Cause.DEMAND, arm, end_s), stage_s={stage.value: took_s}, stage_bins={name: 1})
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
        key = self._of_order(entry)
        self._add(key, outcomes={entry.outcome: 1}, saved_s=entry.saved_s)
        if entry.early_s > 0.0 and entry.ready_s is not None:
            add_memory(self._add, key, "early_byte_s", entry.ready_s, entry.ready_s + entry.early_s, entry.bytes)
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
        key = self._of_row(fact, arm)
        if fact.lease:
            self._add(key, leases=1)
        if fact.is_row:
            self._add(key, rows=1, found={fact.found: 1})
            last_s = self._last_rows.get(fact.model, float("-inf"))
            if fact.ts - last_s >= FIRST_GAP_S:
                self._firsts.setdefault(fact.model, []).append(fact.ts)
            self._last_rows[fact.model] = max(last_s, fact.ts)
        for decision_id in self._watched.get(fact.model, ()):
            entry = self._closed[decision_id]
            assert entry.end_s is not None
            if not entry.premature and entry.end_s <= fact.ts <= entry.end_s + entry.order.hold_s:
                entry.premature = True
                self._changed[entry.order.decision_id] = None
                self._add(self._of_order(entry), premature=1)

    def _row_served(self, fact: facts.RowServed, arm: Arm) -> None:
        key = self._of_row(fact, arm)
        if fact.lease:
            self._add(key, lease_wait_s=fact.wait_s)
        if not fact.is_row:
            return
        wait_bin, tier = bin_of(fact.wait_s), "none" if fact.tier is None else fact.tier.name.lower()
        self._add(
            key,
            wait_s=fact.wait_s,
            bypassed=int(fact.bypass),
            dropped=int(fact.dropped),
            waits={wait_bin: 1},
            served={tier: 1},
            served_wait_s={tier: fact.wait_s},
        )
        waiting = self._firsts.get(fact.model, [])
        if fact.ts in waiting:
            waiting.remove(fact.ts)
            if not waiting:
                del self._firsts[fact.model]
            self._add(key, first_waits={wait_bin: 1})
            slot = self._slots.setdefault(int(fact.ts // SLOT_S), {})
            slot[wait_bin] = slot.get(wait_bin, 0) + 1

    def _of_row(self, fact: facts.RowSeen | facts.RowServed, arm: Arm) -> TotalsKey:
        tenant = fact.tenant
        if tenant and tenant not in self._tenants:
            if len(self._tenants) >= _MOST_TENANTS:
                tenant = _OTHERS
            else:
                self._tenants[tenant] = None
        return TotalsKey(fact.model, Cause.DEMAND, arm, int(fact.ts // HOUR_S), tenant=tenant)

    def _transfer(self, fact: facts.TransferEnded, arm: Arm) -> None:
        entry = self._open.get(fact.decision_id) if fact.decision_id is not None else None
        if entry is not None:
            entry.moved_bytes += fact.bytes
            entry.moving_s += fact.end_s - fact.start_s
        key = self._of_memory(fact.key.model, fact.to_tier, fact.cause, fact.decision_id, arm, fact.end_s)
        self._add(key, moved_bytes=fact.bytes)

    def _residency(self, fact: facts.ResidencyEnded, arm: Arm) -> None:
        if fact.tier >= Tier.HOST:
            for key, amounts in self._entry(fact, arm).memory(fact.end_s):
                self._add(key, **amounts)
        if fact.decision_id is not None:
            self._behind.pop(fact.decision_id, None)

    def _entry(self, fact: facts.ResidencyEnded, arm: Arm) -> HeldEntry:
        """The memory of `fact` as something that is held; what was in use to the end has no last use."""
        behind = self._behind_of(fact.decision_id, arm)
        open_order = self._open.get(fact.decision_id) if fact.decision_id is not None else None
        waits_for_use = open_order is not None and open_order.ready_s is not None and open_order.outcome is Outcome.OPEN
        return HeldEntry(
            model=fact.key.model,
            version=fact.key.version,
            tier=fact.tier.name.lower(),
            cause=fact.cause,
            arm=behind.arm,
            bytes=fact.bytes,
            start_s=fact.start_s,
            last_use_s=fact.last_use_s,
            in_use=fact.last_use_s is not None and fact.last_use_s >= fact.end_s,
            guessed=fact.decision_id is not None and fact.cause is not Cause.MANUAL,
            early_from_s=open_order.ready_s if open_order is not None and waits_for_use else None,
            predictor=behind.predictor,
            source=behind.source,
        )

    def _of_memory(self, model: ModelName, tier: Tier, cause: Cause, decision_id: DecisionId | None, arm: Arm, at_s: float) -> TotalsKey:
        behind = self._behind_of(decision_id, arm)
        return TotalsKey(model, cause, behind.arm, int(at_s // HOUR_S), tier.name.lower(), behind.predictor, behind.source)

    def _behind_of(self, decision_id: DecisionId | None, arm: Arm) -> _Behind:
        if decision_id is None:
            return _Behind(arm, "", "")
        entry = self._open.get(decision_id) or self._closed.get(decision_id)
        return _behind(entry.order) if entry is not None else self._behind.get(decision_id, _Behind(arm, "", ""))

    def _of_order(self, entry: OrderEntry) -> TotalsKey:
        order, behind = entry.order, _behind(entry.order)
        hour, tier = int(order.issued_s // HOUR_S), order.tier.name.lower()
        return TotalsKey(order.key.model, order.cause, order.arm, hour, tier, behind.predictor, behind.source)

    def _add(self, key: TotalsKey, **amounts: Any) -> None:
        """Adds to the hour and to the lifetime; nothing is ever taken away again."""
        hour = self._totals.get(key.hour)
        if hour is None:
            hour = self._totals[key.hour] = {}
            if key.hour < self._handed_out:
                self._part += 1
                self._parts[key.hour] = self._part
        self._as_json.pop(key.hour, None)
        if self._tells:
            self._changes += 1
            self._untold[key] = self._changes
        for totals in (hour.setdefault(key, Totals()), self._lifetime.setdefault((key.cause, key.arm), Totals())):
            add_amounts(totals, amounts)

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
            if fact.tier >= Tier.HOST:
                for key, amounts in self._entry(fact, arm).memory(fact.end_s):
                    add_amounts(sums.setdefault((key.cause, key.arm), Totals()), amounts)
        return sums

    def held_entries(self, held: Iterable[facts.ResidencyEnded], *, arm: Arm = Arm.TREATED) -> list[HeldEntry]:
        """What is held and was not added up yet, as it is to be told."""
        return [self._entry(fact, arm) for fact in held if fact.tier >= Tier.HOST]

    def changed_sums(self) -> list[Sum]:
        """Sums that changed since they were told, as they stand; in the order of their last change."""
        return [
            Sum(self._parts.get(key.hour, 0), key, sum_totals([self._totals[key.hour][key]]), change)
            for key, change in sorted(self._untold.items(), key=lambda item: item[1])
        ]

    def sums_told(self, told: Iterable[Sum]) -> None:
        """Whoever was to know these sums knows them."""
        for each in told:
            if self._untold.get(each.key) == each.change:
                del self._untold[each.key]

    def part_of(self, hour: int) -> int:
        """The part of `hour` that is kept now; 0 is its first."""
        return self._parts.get(hour, 0)

    def hour(self, hour: int) -> list[tuple[TotalsKey, Totals]]:
        """The sums of an hour that are kept, in the order of their keys."""
        return sorted(self._totals.get(hour, {}).items(), key=lambda item: item[0])

    def first_hour_s(self, now_s: float) -> float:
        """When the oldest hour that is kept began; `now_s` where none is."""
        return min(self._totals) * HOUR_S if self._totals else now_s

    def slots(self) -> dict[int, dict[int, int]]:
        """Waits of first requests of the last hours, as bins by slot of `SLOT_S` since 1970."""
        return self._slots

    def take_old_totals(self, now_s: float) -> dict[TotalsKey, Totals]:
        """Totals of hours that are no longer kept, handed out once. An hour that changes later starts a new sum to be added to these."""
        oldest = int(now_s // HOUR_S) - self._keep_hours
        untold = {key.hour for key in self._untold}
        old: dict[TotalsKey, Totals] = {}
        for hour in [hour for hour in self._totals if hour < oldest and hour not in untold]:
            old |= self._totals.pop(hour)
            self._as_json.pop(hour, None)
            self._parts.pop(hour, None)
        self._handed_out = max(self._handed_out, oldest)
        self._slots = {slot: bins for slot, bins in self._slots.items() if slot * SLOT_S >= now_s - _SLOTS_KEPT_S}
        self._last_rows = {model: at_s for model, at_s in self._last_rows.items() if now_s - at_s < FIRST_GAP_S}
        return old

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """Everything that `restore` needs; JSON types only."""
        built: dict[str, Any] = msgspec.to_builtins(self._state([list(hour.items()) for hour in self._totals.values()]), str_keys=True)
        return built

    def encoded(self) -> bytes:
        """The snapshot as JSON; takes time for what changed since the last call and for what is open only."""
        for hour, totals in self._totals.items():
            if hour not in self._as_json:
                self._as_json[hour] = msgspec.Raw(msgspec.json.encode(list(totals.items())))
        # Hours that are JSON already stand where a list of their sums would.
        return msgspec.json.encode(self._state([self._as_json[hour] for hour in self._totals]))

    def _state(self, hours: list[Any]) -> _State:
        return _State(
            _FORMAT,
            list(self._open.values()),
            list(self._closed.values()),
            list(self._changed),
            hours,
            [(cause, arm, totals) for (cause, arm), totals in self._lifetime.items()],
            parts=self._parts,
            part=self._part,
            handed_out=self._handed_out,
            untold=[key for key, _ in sorted(self._untold.items(), key=lambda item: item[1])],
            behind=self._behind,
            last_rows=self._last_rows,
            firsts=self._firsts,
            slots=self._slots,
            tenants=list(self._tenants),
        )

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from a snapshot, also of an older format. Raises InputError when it is none."""
        try:
            state = msgspec.convert(_with_keys_as_rows(snapshot), _State, str_keys=True)
        except msgspec.ValidationError as exc:
            raise InputError(f"not a snapshot of a ledger: {exc}; remove it to start empty") from exc
        if not 1 <= state.format <= _FORMAT:
            raise InputError(f"a ledger's snapshot in format {state.format}, expected up to {_FORMAT}; remove it to start empty")
        self._open = {entry.order.decision_id: entry for entry in state.open}
        self._closed = {entry.order.decision_id: entry for entry in state.closed}
        self._changed = dict.fromkeys(state.changed)
        self._totals = {hour[0][0].hour: dict(hour) for hour in state.hours if hour}
        self._as_json = {}
        self._lifetime = {(cause, arm): totals for cause, arm, totals in state.lifetime}
        self._parts, self._part, self._handed_out = state.parts, state.part, state.handed_out
        self._behind, self._last_rows, self._firsts = state.behind, state.last_rows, state.firsts
        self._slots, self._tenants = state.slots, dict.fromkeys(state.tenants)
        untold = [key for hour in self._totals.values() for key in hour] if state.format == 1 else state.untold
        self._untold = {key: i for i, key in enumerate(untold, start=1)} if self._tells else {}
        self._changes = len(untold)
        self._watched = {}
        for decision_id, entry in self._closed.items():
            if entry.outcome in (Outcome.USELESS, Outcome.DISPLACED):
                self._watched.setdefault(entry.order.key.model, {})[decision_id] = None
        if state.format == 1:
            begun = [entry for entry in state.open if entry.begin_s is not None]
            self._behind = {entry.order.decision_id: _behind(entry.order) for entry in begun}


def _key(model: ModelName, cause: Cause, arm: Arm, at_s: float) -> TotalsKey:
    return TotalsKey(model, cause, arm, int(at_s // HOUR_S))


def _with_keys_as_rows(snapshot: Any) -> Any:
    """A snapshot of the first format with its keys as later ones have them."""
    if not isinstance(snapshot, dict) or snapshot.get("format") != 1:
        return snapshot
    try:
        hours = [[[list(key.values()), totals] for key, totals in hour] for hour in snapshot["hours"]]
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise InputError(f"not a snapshot of a ledger: its hours can't be read ({exc}); remove it to start empty") from exc
    return snapshot | {"hours": hours}


def _behind(order: Order) -> _Behind:
    """The largest contribution speaks for the order; what people and schedules say has no predictor."""
    said = order.cause in (Cause.HINT, Cause.BATCH, Cause.MANUAL)
    predictor = order.contributions[0][0] if order.contributions and not said else ""
    return _Behind(order.arm, predictor, order.source)
