"""Calls to nodes whose agents run elsewhere, through the state store: a plan was written, rows came, do this by hand.

What is said and not heard is found by the agent itself: plans within a second, demand when a program opens weights. Covers no hearing
(`agent.hearing`).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName, RequestSeen
from prefetcher.errors import UnavailableError
from prefetcher.ports import Acted, StateStore
from prefetcher.telemetry.logs import log

__all__ = ["NodeCalls", "RemoteNode"]

#: An agent answers an act within milliseconds. Whoever asked waits this long in all.
_ANSWER_S = 5.0
_LOOK_S = 0.02
_ANSWER_EXPIRES_S = 60.0


class NodeCalls:
    """Tells agents in other processes. Never fails: a store that is away is the agent's to notice."""

    def __init__(self, state: StateStore) -> None:
        self._state = state

    def plan_written(self, node: NodeName) -> None:
        self._say(node, records.Call("plan"))

    def rows(self, node: NodeName, rows: Sequence[RequestSeen], index: Mapping[str, float]) -> None:
        self._say(node, records.Call("rows", rows=tuple(rows), index=dict(index)))

    def switched(self, node: NodeName) -> None:
        self._say(node, records.Call("switch"))

    def _say(self, node: NodeName, call: records.Call) -> None:
        try:
            self._state.publish(records.node_key(node, "calls"), records.encode(call))
        except UnavailableError as exc:
            log().debug("call_not_made", node=node, kind=call.kind, reason=str(exc))


class RemoteNode:
    """A node elsewhere as people may handle it (`api.service.NodeByHand`)."""

    def __init__(self, node: NodeName, state: StateStore, clock: Clock) -> None:
        self._node = node
        self._state = state
        self._clock = clock

    def act(self, act: str, model: str) -> Acted:
        key = records.node_key(self._node, f"answer/{uuid.uuid4().hex}")
        call = records.Call("act", act=act, model=model, answer_key=key)
        if not self._state.publish(records.node_key(self._node, "calls"), records.encode(call)):
            raise UnavailableError(f"nobody listens for node {self._node}; look after its agent", retry_after_s=5.0)
        never, left = threading.Event(), round(_ANSWER_S / _LOOK_S)
        while left > 0:
            raw = self._state.read(key)
            if raw is not None:
                try:
                    return msgspec.json.decode(raw, type=Acted)
                except msgspec.MsgspecError as exc:
                    raise UnavailableError(f"node {self._node} answered what can't be read: {exc}") from exc
            left -= 1
            self._clock.wait(never, _LOOK_S * self._clock.speed)
        raise UnavailableError(f"node {self._node} did not answer within {_ANSWER_S:.0f} s", retry_after_s=5.0)

    def switch(self, on: bool) -> None:
        NodeCalls(self._state).switched(self._node)

    def check(self) -> str:
        """'': a node elsewhere answers for its own health."""
        return ""
