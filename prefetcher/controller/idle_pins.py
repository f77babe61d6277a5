"""Pins that earn too little: followed at every plan, shown in reports, and, where that is allowed, taken away with the reason in the list
of what was done by hand.

A pin is taken away by giving it an end that is now: endpoints end pins, on every node, as they do with any whose time is up. Covers no rule
(`core.idle_spend`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from prefetcher.controller import records
from prefetcher.core.idle_spend import IdleSpend, Kept, Spend
from prefetcher.core.types import ModelName, NodeName
from prefetcher.core.value import price_per_byte_s
from prefetcher.ports import StateStore
from prefetcher.report.messages import IdlePin
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.words import span

__all__ = ["BY", "IdlePins", "read_idle_pins"]

#: Who did it, in the list of what was done by hand.
BY = "prefetcher"
_GB_H = 3.6e12


class IdleRecord(msgspec.Struct):
    """What is under the `idle-pins` key: all that is followed, what of it is reported, and what was released lately."""

    spends: list[Spend] = []
    pins: list[IdlePin] = []


_records = msgspec.json.Decoder(IdleRecord)


@dataclass(slots=True)
class IdlePins:
    """For one controller. `after_s`: how long an index may be under the price; `release`: whether any such pin may be taken away."""

    state: StateStore
    metrics: Metrics
    price_s_per_gb_h: float
    after_s: float
    release: bool
    _spend: IdleSpend = field(default_factory=IdleSpend)
    _kept: dict[NodeName, list[Kept]] = field(default_factory=dict)
    _pins: dict[str, records.Pin] = field(default_factory=dict)
    _released: list[IdlePin] = field(default_factory=list)
    _written: bytes | None = None

    def start(self) -> None:
        """Goes on from what the last leader wrote. Raises UnavailableError."""
        raw = self.state.read(records.IDLE_PINS)
        with contextlib.suppress(ValueError):
            if raw is not None:
                found = records.decode(raw, _records)
                self._spend.restore(found.spends)
                self._released = [pin for pin in found.pins if pin.released_at_s is not None]

    def look(self, node: NodeName, report: records.NodeReport, keep: np.ndarray, pins: Mapping[str, records.Pin], now_s: float) -> None:
        """What `node` keeps as of its report; `keep` float64[len(report.known)] is the index of each model that it knows."""
        index = {known.model: float(value) for known, value in zip(report.known, keep, strict=True)}
        self._pins = dict(pins)
        self._kept[node] = [
            Kept(ModelName(held.model), held.bytes, index.get(held.model, 0.0), "pin" if held.model in pins else "policy")
            for held in report.held
            # What is leased is in use, whatever is forecast.
            if held.pinned and held.state == "ready" and not held.leases
        ]
        self._spend.look(node, self._kept[node], price_per_byte_s(self.price_s_per_gb_h), now_s)

    def tell(self, nodes: Sequence[NodeName], now_s: float) -> None:
        """Writes what is idle, and takes away what may be taken away.

        Raises:
            UnavailableError: the state store does not answer.
        """
        self._spend.forget(nodes)
        self._kept = {node: kept for node, kept in self._kept.items() if node in nodes}
        idle = [self._pin(spend) for spend in self._spend.idle(self.after_s)]
        places = [(node, each.model) for node, kept in self._kept.items() for each in kept if each.why == "pin"]
        for model in self._spend.releasable(self.after_s, places):
            if self._may_release(model) and self._take_away(model, [pin for pin in idle if pin.model == model], now_s):
                self._released += [msgspec.structs.replace(pin, released_at_s=now_s) for pin in idle if pin.model == model]
                idle = [pin for pin in idle if pin.model != model]
        self._released = [pin for pin in self._released if now_s - (pin.released_at_s or 0.0) < self.after_s]
        self.metrics.idle_pins.set(len(idle))
        self.metrics.idle_pin_bytes.set(sum(pin.bytes for pin in idle))
        raw = records.encode(IdleRecord(self._spend.snapshot(), [*idle, *self._released]))
        if raw != self._written:
            self.state.write({records.IDLE_PINS: raw})
            self._written = raw

    def _pin(self, spend: Spend) -> IdlePin:
        pin = self._pins.get(spend.model)
        return IdlePin(
            model=spend.model,
            node=spend.node,
            why=spend.why,
            bytes=spend.bytes,
            under_since_s=spend.under_since_s,
            index_ratio=spend.index_ratio,
            held_gb_h=spend.byte_s / _GB_H,
            cost_s=spend.cost_s,
            earned_s=spend.earned_s,
            by="" if pin is None else pin.by,
            pinned_at_s=None if pin is None else pin.at_s,
            allowed=spend.why == "pin" and self._may_release(spend.model),
        )

    def _may_release(self, model: str) -> bool:
        pin = self._pins.get(model)
        return pin is not None and (self.release or pin.allow_release)

    def _take_away(self, model: str, idle: Sequence[IdlePin], now_s: float) -> bool:
        """Whether the pin was given its end; one that somebody changed meanwhile stands."""
        raw = self.state.read(records.PINS)
        try:
            pins = records.decode_pins(raw)
        except ValueError:
            return False
        pin = pins.get(model)
        if pin is None or pin != self._pins.get(model):
            return False
        ended = pins | {model: msgspec.structs.replace(pin, until_s=now_s)}
        if not self.state.replace(records.PINS, raw, records.encode(ended)):
            return False
        since_s = max((each.under_since_s for each in idle), default=now_s)
        held, cost, earned = (sum(getattr(each, name) for each in idle) for name in ("held_gb_h", "cost_s", "earned_s"))
        reason = f"worth less than its price for {span(now_s - since_s)}: {held:.1f} GB·h cost {cost:.3g} s and saved {earned:.3g} s"
        done = records.ByHand("unpin", now_s, BY, model, reason=reason)
        self.state.append(records.BY_HAND, [records.encode(done)], records.BY_HAND_KEPT)
        log().info("pin_released", model=model, by=pin.by, reason=reason)
        return True


def read_idle_pins(state: StateStore) -> list[IdlePin]:
    """What the controller told last, nothing where it told nothing that can be read.

    Raises:
        UnavailableError: the state store does not answer.
    """
    raw = state.read(records.IDLE_PINS)
    try:
        return [] if raw is None else records.decode(raw, _records).pins
    except ValueError:
        return []
