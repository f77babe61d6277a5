"""What the tests of the HTTP endpoint share: an endpoint over twins, nodes that say what a test wants, and hints that were taken in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.testclient import TestClient

from prefetcher.api.endpoint import make_endpoint
from prefetcher.api.keys import Access
from prefetcher.api.service import Service
from prefetcher.clock import Clock, VirtualClock
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport
from prefetcher.core.types import NodeName
from prefetcher.ports import Acted, StateStore, Streams, Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import HintMessage, decode_hint
from prefetcher_connectors.memory import MemoryState, MemoryStreams

__all__ = ["NODE", "T0", "ByHand", "Setup", "hints_of", "report_of"]

T0 = 1_767_225_600.0
NODE = NodeName("node-0")


class ByHand:
    """A node that says what the test wants."""

    def __init__(self) -> None:
        self.answer = Acted(True, "loading")
        self.problem = ""
        self.acts: list[tuple[str, str]] = []
        self.on = True

    def act(self, act: str, model: str) -> Acted:
        self.acts.append((act, model))
        return self.answer

    def switch(self, on: bool) -> None:
        self.on = on

    def check(self) -> str:
        return self.problem


def hints_of(streams: Streams) -> list[HintMessage]:
    """Every hint that was appended."""
    reader = streams.reader([Topic.HINTS], "test", lambda partitions: {})
    found: list[HintMessage] = []
    while chunks := reader.poll(1000, 0.0):
        found += [decode_hint(value) for chunk in chunks for value in chunk.values]
    reader.close()
    return found


def report_of(
    node: str = NODE, held: Sequence[HeldWeights] = (), known: Sequence[str] = ("m0", "org/m1"), **more: Any
) -> records.NodeReport:
    """A node with a link of 1,000 bytes a second that knows models of 1,000 bytes."""
    weights = tuple(KnownWeights(model, "v", 1000, 1.0) for model in known)
    return NodeReport(node, T0, Memory(10_000, 1000), 1000.0, held=tuple(held), known=weights, **more)


class Setup:
    """One endpoint over twins; `with` it where event loops are to be shared. `more` goes to the service."""

    def __init__(
        self,
        streams: Streams | None = None,
        body_limit_bytes: int = 100_000,
        state: StateStore | None = None,
        access: Access | None = None,
        clock: Clock | None = None,
        node: NodeName | None = NODE,
        **more: Any,
    ) -> None:
        self.virtual = VirtualClock(T0)
        self.clock: Clock = clock or self.virtual
        self.streams, self.node, self.metrics = streams or MemoryStreams(), ByHand(), Metrics()
        self.state = state or MemoryState(self.clock)
        self.woken: list[str] = []
        self.controller_problem = ""
        self.service = Service(
            node,
            self.streams.writer(),
            self.state,
            self.node if node is not None else None,
            self.clock,
            self.metrics,
            self.woken.append,
            lambda: self.controller_problem,
            **more,
        )
        self.http = TestClient(make_endpoint(self.service, body_limit_bytes, access), raise_server_exceptions=False)

    def __enter__(self) -> Setup:
        self.http.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.__exit__(None, None, None)
        self.service.close()

    def report(self, *reports: NodeReport) -> None:
        """Nodes report; without any it is this node, which holds m0."""
        held = (HeldWeights("m0", "v", "host", "ready", 1000, cause="forecast", contributions=(("hazard", 0.8),)),)
        for found in reports or (report_of(held=held),):
            node = NodeName(found.node)
            self.state.write({records.node_key(node, "report"): records.encode(found)}, expire_s=records.REPORT_EXPIRES_S)
            self.state.see(records.NODES, node, self.clock.now_s())

    def forecast(self, until_s: float = T0 + 120, **models: tuple[float, float, float]) -> None:
        self.state.write({records.FORECASTS: records.encode(records.Forecasts(T0, until_s, dict(models)))})

    def posts(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("prefetcher_hint_posts_total", {"result": result}) or 0.0
