"""What people do by hand: pin, load and evict models, switch nodes off, on or to observing, for a time or for good; and who did it.

Pins and switches are records in the state store, so that they outlive every process; an end that comes while no endpoint runs is made up
for by the next one. Covers no decision: nodes and controllers read the records.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from prefetcher.api.fleet import Fleet
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, TemporaryError, UnavailableError, UsageError, shortened
from prefetcher.ports import Acted, StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["ACTS", "MODES", "ByHand", "Mode", "NodeByHand", "Wish"]

#: What can be done to a model by hand.
ACTS = ("pin", "unpin", "load", "evict")
Mode = Literal["on", "observe", "off"]
MODES: tuple[Mode, ...] = ("off", "on", "observe")
#: Real seconds between looks at what has an end.
_LOOK_S = 1.0
_PINS_TRIES = 50
_NODE_SEEN_S = 86_400.0
#: Groups that an error names.
_NAMED = 10

_acts = msgspec.json.Decoder(records.ByHand)


class NodeByHand(Protocol):
    """A node as people may handle it."""

    def act(self, act: str, model: str) -> Acted:
        """Raises ModelNotFoundError for an unknown model and UnavailableError when the node does not answer."""
        ...

    def switch(self, on: bool) -> None:
        """The switch was moved; what all switches say together is in the state store."""
        ...

    def check(self) -> str:
        """'' when the node's own path answers, else what is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants it, why, until when (None: for good), and on which node or group ('': on all, or on this one where that is meant)."""

    by: str
    reason: str = ""
    until_s: float | None = None
    node: str = ""
    group: str = ""
    allow_release: bool = False


class ByHand:
    """Safe for threads. `reach(node)` gives a node that is not this process's own."""

    def __init__(
        self,
        node: NodeName | None,
        group: str,
        own: NodeByHand | None,
        reach: Callable[[NodeName], NodeByHand] | None,
        state: StateStore,
        fleet: Fleet,
        clock: Clock,
        metrics: Metrics,
        wake: Callable[[str], None],
    ) -> None:
        self._node = node
        self._group = group
        self._own = own
        self._reach = reach
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._metrics = metrics
        self._wake = wake
        #: The pins at the last look: what is gone since is pinned here no more, whoever took it away.
        self._pins_seen: frozenset[str] = frozenset()
        self._remembered = Remembered(state)
        #: Nodes whose switches are remembered.
        self._nodes_seen: set[NodeName] = set()
        #: What the log said of records that can't be read, by key.
        self._said: dict[str, str] = {}
        self._last_mode: dict[NodeName | None, Mode] = {}

    # --- acts ---

    def act(self, act: str, model: str, wish: Wish, report: records.NodeReport) -> tuple[Acted, records.ByHand]:
        """Does `act` to `model` on the node of `report`. A pin holds across restarts and on every node.

        Raises:
            ModelNotFoundError: the node knows no such model.
            UsageError: an end for what has none, or a node that can't be reached from here.
        """
        if wish.until_s is not None and act != "pin":
            raise UsageError(f"{act} takes no end: a pin and a switch may end by themselves, and what is loaded unused goes within an hour")
        if wish.allow_release and act != "pin":
            raise UsageError(f"{act} is nothing that ends by itself: allow_release is for pins")
        node = NodeName(report.node)
        if model not in {k.model for k in report.known}:
            why = next((problem for problem in report.problems if problem.startswith(f"{model}: ")), "")
            if why:
                raise ModelNotFoundError(why, model=model)
            raise ModelNotFoundError(
                f"no model is called {shortened(repr(model))} on node {node}; `prefetcher status` lists them", model=model
            )
        done = records.ByHand(act, self._clock.now_s(), wish.by, model, node=node, until_s=wish.until_s, reason=wish.reason)
        acted = self._let_go(model, wish.by) if act == "unpin" else None
        if acted is not None:
            if acted.ok:
                self._note(done)
            return acted, done
        acted = self._hands(node).act(act, model)
        if acted.ok and act == "pin":
            pin = records.Pin(wish.by, done.at_s, wish.until_s, wish.allow_release)
            self._change_pins(lambda pins: {**pins, model: pins[model].with_holder(pin) if model in pins else pin})
        elif acted.ok and act == "unpin":
            self._change_pins(lambda pins: {name: pin for name, pin in pins.items() if name != model})
        log().info("acted_by_hand", act=act, model=model, node=node, ok=acted.ok, reason=acted.reason, by=wish.by)
        if acted.ok:
            self._note(done)
        self._wake(act)
        return acted, done

    def _let_go(self, model: str, by: str) -> Acted | None:
        """What becomes of an unpin while others pin the model too, or they alone; None where nobody else does."""
        pin = (self._read_pins(self._state.read(records.PINS)) or {}).get(model)
        if pin is None:
            return None
        if not pin.held_by(by):
            return Acted(False, "pinned_by_other")
        if pin.without_holder(by) is None:
            return None

        def change(pins: dict[str, records.Pin]) -> dict[str, records.Pin]:
            left = pins[model].without_holder(by) if model in pins else None
            return pins if left is None else {**pins, model: left}

        self._change_pins(change)
        return Acted(True, "pinned_by_others")

    def _hands(self, node: NodeName) -> NodeByHand:
        if node == self._node and self._own is not None:
            return self._own
        if self._reach is None:
            raise UsageError(f"node {node} can't be reached from here; ask its own endpoint")
        return self._reach(node)

    def _change_pins(self, change: Callable[[dict[str, records.Pin]], dict[str, records.Pin]]) -> None:
        """Endpoints of other processes may change them at the same moment."""
        for _ in range(_PINS_TRIES):
            raw = self._state.read(records.PINS)
            before = self._read_pins(raw) or {}
            after = dict(sorted(change(before).items()))
            if after == before or self._state.replace(records.PINS, raw, records.encode(after)):
                return
        raise UnavailableError("other endpoints keep changing the pins; ask again")

    def _note(self, done: records.ByHand) -> None:
        try:
            self._state.append(records.BY_HAND, [records.encode(done)], records.BY_HAND_KEPT)
        except UnavailableError as exc:
            # It is done; saying that it is not would be worse than a gap in the list.
            log().warning("act_not_recorded", act=done.act, model=done.model, by=done.by, reason=str(exc))

    def done(self, count: int) -> list[records.ByHand]:
        """The last acts and switches, newest first."""
        found = []
        for raw in reversed(self._state.tail(records.BY_HAND, count)):
            with contextlib.suppress(ValueError):
                found.append(records.decode(raw, _acts))
        return found

    # --- the switch ---

    def mode(self, node: NodeName | None = None) -> Mode:
        """What the switches that concern a node say together, this process's own where none is named: the strictest counts.

        While one of them can't be read: as it was before, as nodes do.
        """
        chosen = node or self._node
        try:
            found = records.strictest(self._state.read_many(self._switches_of(chosen)))
        except ValueError as exc:
            self._say_once("switch", str(exc), "nodes keep their last one; set it again with `prefetcher on` or `prefetcher off`")
            return self._last_mode.get(chosen, "off")
        mode: Mode = "off" if not found.on else "observe" if found.observe else "on"
        self._last_mode[chosen] = mode
        return mode

    def _switches_of(self, node: NodeName | None) -> list[str]:
        keys = [records.SWITCH]
        if node is not None:
            keys.append(records.node_key(node, "switch"))
        if self._group and node == self._node:
            keys.append(records.group_key(self._group, "switch"))
        return keys

    def switch(self, mode: Mode, wish: Wish) -> records.ByHand:
        """Moves the switch of a node, of a group, or of all; nodes look at once.

        Raises:
            UsageError: a node and a group.
            ModelNotFoundError: no such node or group.
            UnavailableError: the store is away, and no switch was moved.
        """
        if wish.node and wish.group:
            raise UsageError("name a node or a group, not both")
        now_s = self._clock.now_s()
        key = records.SWITCH
        if wish.node:
            key = records.node_key(NodeName(wish.node), "switch")
            if wish.node != self._node and wish.node not in self._state.members(records.NODES, now_s - _NODE_SEEN_S):
                raise ModelNotFoundError(f"no node is called {shortened(repr(wish.node))}; those that report are in /v1/status")
        elif wish.group:
            key = records.group_key(wish.group, "switch")
            groups = {report.group for report in self._fleet.view().reports.values()} - {""}
            # A group of nodes that are all down may be switched all the same, if it was before.
            if wish.group not in groups | {self._group} and self._state.read(key) is None:
                there = ", ".join(sorted(groups)[:_NAMED]) or "none; PREFETCHER_NODE__GROUP of an agent names one"
                raise ModelNotFoundError(f"no node that reports is of group {shortened(repr(wish.group))}; groups: {there}")
        said = records.Switch(on=mode != "off", observe=mode == "observe", since_s=now_s, by=wish.by, until_s=wish.until_s)
        self._state.write({key: records.encode(said)})
        done = records.ByHand(mode, now_s, wish.by, node=wish.node, group=wish.group, until_s=wish.until_s, reason=wish.reason)
        self._tell(wish)
        self._note(done)
        log().info("switched_by_hand", mode=mode, node=wish.node, group=wish.group, by=wish.by, until_s=wish.until_s)
        return done

    def _tell(self, wish: Wish) -> None:
        """Nodes look at their switches: this process's own, and those elsewhere that it may concern."""
        if self._own is not None:
            mode = self.mode()
            self._own.switch(mode != "off")
            self._metrics.prefetching.set(1.0 if mode == "on" else 0.0)
        if self._reach is not None:
            with contextlib.suppress(TemporaryError):
                others = [NodeName(wish.node)] if wish.node else list(self._fleet.view().reports)
                for node in others:
                    if node != self._node:
                        self._reach(node).switch(True)
        self._wake("switch")

    # --- what ends by itself ---

    def run(self, stop: threading.Event) -> None:
        """Looks once a second until `stop`. A store that is away is waited out."""
        while not self._clock.wait(stop, _LOOK_S * self._clock.speed):
            with contextlib.suppress(TemporaryError):
                self.look_after()

    def look_after(self) -> None:
        """Ends pins and switches whose time is up, and unpins on every node what was unpinned on one. Raises UnavailableError."""
        now_s = self._clock.now_s()
        nodes = self._nodes()
        self._mind_forgotten(nodes)
        keys = [records.SWITCH, *(records.node_key(node, "switch") for node in nodes)]
        if self._group:
            keys.append(records.group_key(self._group, "switch"))
        # Of schedules only that they are not lost.
        looked_at = [records.PINS, records.SCHEDULES, *keys]
        raw_pins, _, *switches = self._remembered.look(looked_at, self._state.read_many(looked_at))
        pins = self._read_pins(raw_pins)
        if pins is not None:
            self._look_after_pins(pins, now_s)
        for key, raw in zip(keys, switches, strict=True):
            said = self._read_switch(key, raw)
            if said is not None and said.until_s is not None and said.until_s <= now_s:
                ended = records.Switch(since_s=said.until_s, by=f"{said.by}, at its end")
                if self._state.replace(key, raw, records.encode(ended)):
                    log().info("switch_ended", key=key, by=said.by)
                self._tell(Wish(said.by))

    def _mind_forgotten(self, nodes: Sequence[NodeName]) -> None:
        """The switch of a node that was forgotten is not written back should its name come again."""
        silent = self._nodes_seen - set(nodes)
        if silent:
            known = self._state.last_seen(records.NODES)
            # A store that knows no node at all lost its memory.
            forgotten = {node for node in silent if known and node not in known}
            self._remembered.drop(records.node_key(node, "switch") for node in forgotten)
            self._nodes_seen -= forgotten
        self._nodes_seen |= set(nodes)

    def _look_after_pins(self, pins: dict[str, records.Pin], now_s: float) -> None:
        left = {name: (pin, pin.standing(now_s)) for name, pin in pins.items()}
        over = {name for name, (_, stands) in left.items() if stands is None}
        if any(pin != stands for pin, stands in left.values()):

            def change(found: dict[str, records.Pin]) -> dict[str, records.Pin]:
                now = {name: left[name][1] if left.get(name, (None,))[0] == pin else pin for name, pin in found.items()}
                return {name: pin for name, pin in now.items() if pin is not None}

            self._change_pins(change)
        if over:
            log().info("pins_ended", models=sorted(over))
        standing = frozenset(pins) - frozenset(over)
        gone = self._pins_seen - standing | frozenset(over)
        for model in sorted(gone):
            self._unpin_everywhere(model)
        if gone:
            self._wake("unpin")
        self._pins_seen = standing

    def _read_pins(self, raw: bytes | None) -> dict[str, records.Pin] | None:
        """None while they can't be read, which is no reason to unpin what nodes hold."""
        try:
            pins = records.decode_pins(raw)
        except ValueError as exc:
            self._say_once(records.PINS, str(exc), "nodes keep what they hold; the next pin by hand begins a new list")
            return None
        self._said.pop(records.PINS, None)
        return pins

    def _read_switch(self, key: str, raw: bytes | None) -> records.Switch | None:
        try:
            said = None if raw is None else records.decode_switch(raw)
        except ValueError as exc:
            self._say_once(key, str(exc), "nodes keep their last one; set it again with `prefetcher on` or `prefetcher off`")
            return None
        self._said.pop(key, None)
        return said

    def _say_once(self, key: str, reason: str, then: str) -> None:
        if self._said.get(key) != reason:
            self._said[key] = reason
            log().error("record_unreadable", key=key, reason=reason, then=then)

    def _unpin_everywhere(self, model: str) -> None:
        """Here, and where a node still says that it is pinned: it may have been pinned by hand there, or have started while it was."""
        for node, report in sorted(self._fleet.view().reports.items()):
            if node != self._node and any(held.model == model and held.pinned for held in report.held):
                with contextlib.suppress(TemporaryError, ModelNotFoundError, UsageError):
                    self._hands(node).act("unpin", model)
        if self._own is not None:
            with contextlib.suppress(ModelNotFoundError):
                self._own.act("unpin", model)

    def _nodes(self) -> list[NodeName]:
        found = set(self._fleet.view().reports)
        return sorted(found | ({self._node} if self._node is not None else set()))
