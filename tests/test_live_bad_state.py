"""Records in the state store that are none, whoever wrote them: one node or one switch does not do, and nobody ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from api_kit import NODE, T0, Setup, report_of

from prefetcher.api.by_hand import Wish
from prefetcher.clock import VirtualClock
from prefetcher.controller import records
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.learner import Learner
from prefetcher.controller.records import KnownWeights, Memory, NodeReport
from prefetcher.core.types import Arm, NodeName, Plan
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState, MemoryStreams

OTHER = NodeName("node-1")
NONSENSE = [b"", b"nonsense", b'{"node":5,"v":9}', b"[1]", b"\xff\xfe", b'{"a":' * 50_000, records.encode(report_of("somebody"))]


@pytest.mark.parametrize("raw", NONSENSE[:-1])
def test_what_is_no_record_is_a_value_error(raw: bytes) -> None:
    for read in (records.decode_report, records.decode_plan, records.decode_pins):
        with pytest.raises(ValueError, match=r"JSON|Expected|truncated|deep|utf-8|UTF-8"):
            read(raw)
    if not raw.startswith(b'{"node"'):  # a switch without a word of its own
        with pytest.raises(ValueError, match=r"JSON|Expected|truncated|deep|utf-8|UTF-8"):
            records.strictest([None, records.encode(records.Switch()), raw])


class Fleet:
    """A controller over two nodes, of which one says what a test wants."""

    def __init__(self) -> None:
        self.clock, self.metrics = VirtualClock(T0), Metrics()
        self.state = MemoryState(self.clock)
        options = ControllerOptions((), 0.002, 60.0, 600.0, 30.0)
        learner = Learner(lambda: None)
        self.controller = Controller(
            MemoryStreams(), self.state, learner, self.clock, self.metrics, options, lambda node, now_s: Arm.TREATED
        )
        self.controller.start()

    def tick(self, raw: bytes) -> list[str]:
        """Which nodes were planned for when NODE's report was `raw`."""
        self.clock.advance(60.0)
        now_s, known = self.clock.now_s(), (KnownWeights("m0", "v", 1000, 0.01),)
        good = records.encode(NodeReport(OTHER, now_s, Memory(10_000, 0), 1e9, known=known))
        self.state.write({records.node_key(NODE, "report"): raw, records.node_key(OTHER, "report"): good})
        for node in (NODE, OTHER):
            self.state.delete([records.node_key(node, "plan")])
            self.state.see(records.NODES, node, now_s)
        self.controller.step()
        return [node for node in (NODE, OTHER) if self.state.read(records.node_key(node, "plan")) is not None]

    def plan(self) -> Plan:
        raw = self.state.read(records.node_key(OTHER, "plan"))
        assert raw is not None
        return records.decode_plan(raw)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.controller.close()


@pytest.mark.parametrize("raw", NONSENSE)
def test_a_report_that_is_none_costs_one_node(fleet: Fleet, raw: bytes) -> None:
    with structlog.testing.capture_logs() as logged:
        assert fleet.tick(raw) == [OTHER]
        assert fleet.tick(raw) == [OTHER]
    assert [(e["event"], e["node"]) for e in logged if e["log_level"] == "error"] == [("report_unreadable", NODE)]
    labels = {"what": "plan", "reason": "report_unreadable"}
    assert fleet.metrics.registry.get_sample_value("prefetcher_skipped_total", labels) == 2
    good = records.encode(NodeReport(NODE, fleet.clock.now_s(), Memory(10_000, 0), 1e9))
    assert fleet.tick(good) == [NODE, OTHER]


def test_pins_and_a_switch_that_are_none(fleet: Fleet) -> None:
    fleet.state.write({records.SWITCH: records.encode(records.Switch(on=False))})
    fleet.tick(b"")
    assert not fleet.plan().prefetch_enabled
    with structlog.testing.capture_logs() as logged:
        fleet.state.write({records.SWITCH: b"nonsense", records.PINS: b"nonsense"})
        for _ in range(2):
            assert fleet.tick(b"") == [OTHER]
            assert not fleet.plan().prefetch_enabled
    assert sorted(e["event"] for e in logged if e["log_level"] == "error") == ["pins_unreadable", "switch_unreadable"]
    # Nor does one that is gone turn it on: nodes and endpoints write it back.
    fleet.state.delete([records.SWITCH])
    fleet.tick(b"")
    assert not fleet.plan().prefetch_enabled
    fleet.state.write({records.SWITCH: records.encode(records.Switch())})
    fleet.tick(b"")
    assert fleet.plan().prefetch_enabled


@pytest.mark.parametrize("raw", [b"nonsense", b'{"a":' * 50_000, b"[1]"])
def test_an_endpoint_answers_whatever_lies_in_the_store(raw: bytes) -> None:
    with Setup() as setup:
        setup.report()
        setup.service.by_hand.switch("off", Wish("ops"))
        setup.service.by_hand.act("pin", "m0", Wish("ops"), report_of())
        setup.service.by_hand.look_after()
        assert setup.http.get("/v1/status").json()["mode"] == "off"
        keys = [records.SWITCH, records.PINS, records.FORECASTS]
        setup.state.write(dict.fromkeys([*keys, *(records.node_key(NODE, what) for what in ("totals", "decides"))], raw))
        for key in (records.BY_HAND, records.node_key(NODE, "orders")):
            setup.state.append(key, [raw], 10)
        with structlog.testing.capture_logs() as logged:
            for _ in range(2):
                setup.service.by_hand.look_after()
                answer = setup.http.get("/v1/status")
                assert (answer.status_code, answer.json()["mode"]) == (200, "off")
        assert [e["key"] for e in logged if e["event"] == "record_unreadable"].count(records.PINS) == 1
        assert ("unpin", "m0") not in setup.node.acts
        assert setup.http.get("/v1/orders").json() == []
        setup.state.write({records.node_key(NODE, "report"): raw})
        assert setup.http.get("/v1/status").status_code == 503
        # People set right what was wrong.
        setup.report()
        setup.service.by_hand.switch("on", Wish("ops"))
        setup.service.by_hand.act("pin", "m0", Wish("ops"), report_of())
        assert setup.http.get("/v1/status").json()["mode"] == "on"
        assert set(records.decode_pins(setup.state.read(records.PINS))) == {"m0"}


def test_an_endpoint_writes_back_what_the_store_forgot() -> None:
    with Setup() as setup:
        setup.report()
        setup.service.by_hand.switch("off", Wish("ops", node=NODE))
        setup.service.by_hand.act("pin", "m0", Wish("ops", until_s=T0 + 900.0), report_of())
        setup.service.by_hand.look_after()
        keys = [records.PINS, records.node_key(NODE, "switch")]
        before = setup.state.read_many(keys)
        setup.state.delete(keys)
        setup.service.by_hand.look_after()
        assert setup.state.read_many(keys) == before
        assert ("unpin", "m0") not in setup.node.acts
        # What is unpinned is not brought back.
        setup.service.by_hand.act("unpin", "m0", Wish("ops"), report_of())
        setup.service.by_hand.look_after()
        assert records.decode_pins(setup.state.read(records.PINS)) == {}
