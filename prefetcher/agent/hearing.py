"""What others say to this node through the state store: there is a plan, rows came, somebody acts by hand, the switch was moved.

Runs in a thread of its own and hands over to the agent. What was missed while the store was away is looked for by whoever needs it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ports import Acted, StateStore
from prefetcher.telemetry.logs import log

if TYPE_CHECKING:
    from prefetcher.agent.agent import Agent

__all__ = ["Hearing"]

#: Between tries to listen while the store is away.
_AGAIN_S = 0.5
_ANSWER_EXPIRES_S = 60.0

_decode = msgspec.json.Decoder(records.Call).decode


class Hearing:
    """Listens for `node` and has `agent` do it. `run` is for a thread of its own."""

    def __init__(self, state: StateStore, node: NodeName, agent: Agent) -> None:
        self._state = state
        self._node = node
        self._agent = agent

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            # Something may have been said while nobody listened.
            self._agent.plan_written()
            self._state.listen([records.node_key(self._node, "calls")], self._hear, stop)
            stop.wait(_AGAIN_S)

    def _hear(self, channel: str, message: bytes) -> None:
        try:
            call = _decode(message)
        except msgspec.MsgspecError as exc:
            log().warning("call_not_understood", reason=str(exc), then="it is passed over")
            return
        match call.kind:
            case "plan" | "switch":
                self._agent.plan_written()
            case "rows":
                self._agent.requested(call.rows, call.index)
            case "act":
                self._act(call)

    def _act(self, call: records.Call) -> None:
        try:
            acted = self._agent.act(call.act, call.model)
        except PrefetcherError as exc:
            acted = Acted(False, str(exc))
        try:
            self._state.write({call.answer_key: records.encode(acted)}, expire_s=_ANSWER_EXPIRES_S)
        except UnavailableError as exc:
            log().warning("act_not_answered", act=call.act, model=call.model, reason=str(exc))
