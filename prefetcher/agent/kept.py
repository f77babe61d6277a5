"""What outlives an agent's process: its ledger and residency machine, kept in the state store together and taken over at the next start.

Snapshots are made often enough that a crash costs a second of counting, and seldom enough that a large node does little else; `state_link`
writes them. Covers neither plans nor reports, and no bytes of weights. Times of the pace are the machine's seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from prefetcher.agent.orderbook import OrderBook
from prefetcher.agent.report import LinkMeter
from prefetcher.agent.sums import SumsState, Told, ToTell
from prefetcher.agent.uses import Uses, UsesState
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.records import OrderRecord
from prefetcher.core.block_sums import BlockSum, BlockSums
from prefetcher.core.residency import ResidencyMachine
from prefetcher.core.types import Arm, NodeName
from prefetcher.errors import InputError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["Kept", "LedgerState", "MachineState", "Snapshot"]

#: Between snapshots when something happened.
_SAVE_S = 1.0
#: Between snapshots when only time passed: at most so much of what is held goes uncounted after a crash.
_SAVE_IDLE_S = 10.0
#: A snapshot takes at most a twentieth of the agent's time, however large the node is.
_SAVE_SHARE = 20.0
#: A snapshot from further ahead was made by a clock that was wrong; the machine's time would stand still until then.
_AHEAD_S = 60.0


class LedgerState(msgspec.Struct):
    """What is written under a node's `ledger` key: a snapshot of its ledger. The list of orders, and the outcomes topic, may lack the
    records that are `untold`; `seq` is above the number of every message that may have been sent; `blocks` are the newest of those under
    the key `blocks`.
    """

    ledger: Any
    untold: list[OrderRecord] = []
    uses: UsesState = msgspec.field(default_factory=UsesState)
    seq: int = 0
    sums: SumsState | None = None
    blocks: list[BlockSum] = []


class MachineState(msgspec.Struct):
    """What is written under a node's `machine` key: a snapshot of its residency machine and what was measured of its link."""

    machine: Any
    link: Any = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Ledger, machine and totals of one instant by key, to be written at once; then the orders that are `untold`, oldest change first,
    the totals, and the parts of `to_tell`, as messages numbered from `seq` on; then what is `shown` of those, at once.
    """

    items: Mapping[str, bytes]
    untold: Sequence[OrderRecord]
    totals: Mapping[str, Any]
    seq: int
    to_tell: ToTell | None = None

    @property
    def parts_seq(self) -> int:
        """The number of the first part."""
        return self.seq + len(self.untold) + 1

    def shown(self, node: NodeName) -> dict[str, bytes]:
        """What the store shows of the sums once they were told."""
        if self.to_tell is None:
            return {}
        numbered = msgspec.structs.replace(self.to_tell.ledger, seq=self.parts_seq + len(self.to_tell.parts) - 1)
        return {**self.to_tell.hours, records.node_key(node, "sums"): records.encode(numbered)}


_State = TypeVar("_State", LedgerState, MachineState)


def _decode(raw: bytes, kind: type[_State]) -> _State:
    try:
        return records.decode(raw, msgspec.json.Decoder(kind))
    except ValueError as exc:
        raise InputError(f"not the state of a node: {exc}; remove it to start empty") from exc


@dataclass(slots=True)
class Kept:
    """The parts of an agent that are kept, in its loop alone. `changed` is set by whoever changes one of them."""

    clock: Clock
    machine: ResidencyMachine
    book: OrderBook
    uses: Uses
    meter: LinkMeter
    told: Told
    blocks: BlockSums
    changed: bool = True
    seq: int = 0
    _unsettled: bool = False
    _saved_at_s: float = -1e18
    _due_s: float = -1e18

    def key(self, what: str) -> str:
        return records.node_key(self.machine.node, what)

    # --- taking over ---

    def restore(self, state: StateStore) -> None:
        """Takes over what was written last. What can't be read starts empty, which is an error in the log.

        Raises:
            UnavailableError: the state store does not answer.
        """
        ledger, machine, blocks = state.read_many([self.key("ledger"), self.key("machine"), self.key("blocks")])
        now_s = self.clock.now_s()
        # Whoever adds messages up takes the highest number for the newest: those of a ledger that begins anew are above all before it,
        # which no node sends a thousand of in a second.
        self.seq = max(self.seq, int(1000.0 * now_s))
        if blocks is not None:
            self._try("blocks", lambda: self._restore_blocks(blocks))
        if ledger is not None:
            self._try("ledger", lambda: self._restore_ledger(ledger, now_s))
        if machine is None or not self._try("machine", lambda: self._restore_machine(machine, now_s)):
            self.book.lose_all(self.machine.node, now_s)

    def _try(self, what: str, restore: Callable[[], None]) -> bool:
        try:
            restore()
        except InputError as exc:
            log().error(f"{what}_unreadable", reason=str(exc), then="starting an empty one")
            return False
        return True

    def _restore_ledger(self, raw: bytes, now_s: float) -> None:
        state = _decode(raw, LedgerState)
        self.book.restore(state.ledger, state.untold)
        self.uses.restore(state.uses, now_s)
        self.seq = state.seq
        self.told.restore(state.sums or SumsState(self.book.ledger.first_hour_s(now_s)))
        self.blocks.restore(self.blocks.blocks(), state.blocks)

    def _restore_machine(self, raw: bytes, now_s: float) -> None:
        state = _decode(raw, MachineState)
        written_s = state.machine.get("now_s") if isinstance(state.machine, dict) else None
        if isinstance(written_s, float) and written_s - now_s > _AHEAD_S * self.clock.speed:
            raise InputError(f"it was written {written_s - now_s:.0f} s from now; set the clock")
        self.machine.restore(state.machine)
        self._try("link", lambda: self.meter.restore(state.link))

    def _restore_blocks(self, raw: bytes) -> None:
        try:
            self.blocks.restore(records.decode(raw, msgspec.json.Decoder(list[BlockSum])))
        except ValueError as exc:
            raise InputError(f"not the sums of a node's blocks: {exc}; remove it to start empty") from exc

    # --- writing ---

    def _real_s(self) -> float:
        return self.clock.steady_s() / self.clock.speed

    @property
    def all_written(self) -> bool:
        """Whether nothing but time passed since what was written last."""
        return not (self.changed or self._unsettled)

    def is_due(self) -> bool:
        """Whether to make a snapshot; never before it is known what became of the last one."""
        now_s = self._real_s()
        if self._unsettled or now_s < self._due_s:
            return False
        return self.changed or bool(self.book.untold) or now_s - self._saved_at_s >= _SAVE_IDLE_S

    def snapshot(self, totals: Mapping[str, Any], arm: Arm, last: bool = False) -> Snapshot:
        """Ledger, machine and `totals` as they are: written together, so that what was shown is never taken back by a crash."""
        started_s = self._real_s()
        self.book.forget(self.clock.now_s())
        # While the store is away orders pile up here; more than its list holds would push each other out of it.
        self.book.told(list(self.book.untold.values())[: -records.ORDERS_KEPT])
        untold = list(self.book.untold.values())
        now_s = self.clock.now_s()
        held = self.book.ledger.held_entries(self.machine.held(now_s), arm=arm)
        to_tell = self.told.to_tell(self.book.ledger, held, now_s, started_s, last)
        seq, self.seq = self.seq, self.seq + len(untold) + 1 + (0 if to_tell is None else len(to_tell.parts))
        raw = msgspec.Raw(self.book.ledger.encoded())
        ledger = LedgerState(raw, untold, self.uses.snapshot(), self.seq, self.told.state(), self.blocks.newest())
        machine = MachineState(msgspec.Raw(self.machine.encoded()), self.meter.snapshot())
        parts = {"ledger": ledger, "machine": machine, "totals": totals}
        items = {self.key(what): records.encode(part) for what, part in parts.items()}
        if self.blocks.changed:
            items[self.key("blocks")] = records.encode(self.blocks.blocks())
            self.blocks.unchanged()
        self.changed, self._unsettled = False, True
        self._saved_at_s = self._real_s()
        self._due_s = self._saved_at_s + max(_SAVE_S, _SAVE_SHARE * (self._saved_at_s - started_s))
        return Snapshot(items, untold, totals, seq, to_tell)

    def settle(self, snapshot: Snapshot, written: bool) -> None:
        """Says what became of a snapshot; what was not written comes with the next one."""
        self._unsettled = False
        if snapshot.to_tell is not None:
            self.told.settle(snapshot.to_tell, self.book.ledger, written)
        if written:
            self.book.told(snapshot.untold)
        else:
            self.changed = self.blocks.changed = True
