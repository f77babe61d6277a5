"""How many nodes fetch from the store at a time: slots that are leases in the state store, so many for a model and so many in all.

A node that finds none free tries again within a second or two; a node that dies leaves its slots to whoever comes when their lease ends.
Where the state store does not answer a node fetches all the same: it is then bounded by the object store's own limits alone.
"""

from __future__ import annotations

import hashlib
import random
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName, WeightsKey
from prefetcher.errors import TemporaryError
from prefetcher.ports import StateStore

__all__ = ["RETRY_S", "Pulls", "Slots"]

#: Seconds of the store's time that a dead node's slots stay taken.
LEASE_S = 15.0
_RENEW_S = 5.0
#: Seconds until a node that found no slot looks again, with half as much again at random.
RETRY_S = 1.0


@dataclass(slots=True)
class Slots:
    """What a fetch holds. `missing` says what it lacks to begin, '' nothing: `model_slot` or `cluster_slot`."""

    keys: list[str]
    holder: str = ""
    missing: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    renewing: threading.Thread | None = None


class Pulls:
    """The slots of all nodes that share `state`, for `node`."""

    def __init__(self, state: StateStore, node: NodeName, clock: Clock, per_model: int, in_all: int) -> None:
        self._state, self._node, self._clock = state, node, clock
        self._per_model, self._in_all = per_model, in_all
        self._random = random.Random()

    def take(self, key: WeightsKey) -> Slots:
        """A slot for the model and one of the cluster's, which are renewed until `give_back`; or what is missing."""
        holder, taken = f"{self._node}/{uuid.uuid4().hex}", list[str]()
        try:
            for missing, slots in (
                ("model_slot", [records.pull_key(_digest(key), n) for n in range(self._per_model)]),
                ("cluster_slot", [records.pull_key("all", n) for n in range(self._in_all)]),
            ):
                free = self._one_of(slots, holder)
                if free is None:
                    self._drop(taken, holder)
                    return Slots([], holder, missing)
                taken.append(free)
        except TemporaryError:
            self._drop(taken, holder)
            return Slots([])
        held = Slots(taken, holder)
        held.renewing = threading.Thread(target=self._renew, args=(held,), name="pulls")
        held.renewing.start()
        return held

    def give_back(self, slots: Slots) -> None:
        slots.stop.set()
        if slots.renewing is not None:
            slots.renewing.join()
        self._drop(slots.keys, slots.holder)

    def retry_s(self) -> float:
        """Seconds of the clock until another look; apart from other nodes'."""
        return RETRY_S * (1.0 + 0.5 * self._random.random()) * self._clock.speed

    def _one_of(self, slots: Sequence[str], holder: str) -> str | None:
        first = self._random.randrange(len(slots))
        for slot in (*slots[first:], *slots[:first]):
            if self._state.take_lease(slot, holder, LEASE_S):
                return slot
        return None

    def _renew(self, slots: Slots) -> None:
        while not self._clock.wait(slots.stop, _RENEW_S * self._clock.speed):
            for slot in slots.keys:
                try:
                    self._state.take_lease(slot, slots.holder, LEASE_S)
                except TemporaryError:
                    break

    def _drop(self, keys: Sequence[str], holder: str) -> None:
        for key in keys:
            try:
                self._state.drop_lease(key, holder)
            except TemporaryError:
                return


def _digest(key: WeightsKey) -> str:
    return hashlib.sha256(f"{key.model}\0{key.version}".encode()).hexdigest()[:16]
