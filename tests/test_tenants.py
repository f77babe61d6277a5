"""Tenants: the file that says what is whose, plans that keep to it, and pins of several holders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_kit import Setup

from prefetcher.clock import VirtualClock
from prefetcher.controller import records
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.learner import Learner
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport
from prefetcher.core.types import Arm, ModelName, NodeName, RequestSeen, TenantQuota
from prefetcher.errors import SettingsError
from prefetcher.ports import Acted, Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.tenants import read_quotas
from prefetcher.wire import RequestMessage, encode
from prefetcher_connectors.memory import MemoryState, MemoryStreams

T0 = 1_767_225_600.0
NODE = NodeName("node-0")


def test_a_file_of_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(
        '[{"tenant": "acme", "models": ["acme/*"], "share": 0.3}, {"tenant": "b", "models": ["x"], "bytes": "2GB", "share": 1}]'
    )
    assert read_quotas(file) == (TenantQuota("acme", ("acme/*",), 0.3), TenantQuota("b", ("x",), 1.0, 2_000_000_000))
    assert read_quotas(None) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "expected"),
        ('{"tenant": "a"}', "expected"),
        ('[{"tenant": "a", "models": ["m"], "limit": 1}]', "limit"),
        ('[{"tenant": "a", "models": ["m"]}]', "'a' has neither a share nor bytes"),
        ('[{"tenant": "a", "models": [], "share": 0.1}]', "names no model"),
        ('[{"tenant": "a", "models": ["m"], "share": 1.5}]', "share of 1.5"),
        ('[{"tenant": "a", "models": ["m"], "bytes": "much"}]', "'much' is not a size"),
        ('[{"tenant": "a", "models": ["m"], "share": 1}, {"tenant": "a", "models": ["n"], "share": 1}]', "no name of its own"),
    ],
)
def test_a_file_that_is_none_says_what_was_expected(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match="TENANTS_FILE") as refused:
        read_quotas(file)
    assert why in str(refused.value)
    with pytest.raises(SettingsError, match="can't be read"):
        read_quotas(tmp_path / "none.json")


class World:
    """One controller over twins, and a node of five models of 1 MB, asked for the more often the higher their number."""

    def __init__(self, *quotas: TenantQuota) -> None:
        self.clock, self.state, self.metrics = VirtualClock(T0), MemoryState(), Metrics()
        streams = MemoryStreams()
        options = ControllerOptions((NODE,), 0.002, 60.0, 600.0, 1e9, quotas=quotas)
        self.controller = Controller(
            streams, self.state, Learner(lambda: None), self.clock, self.metrics, options, arm_of=lambda node, now_s: Arm.TREATED
        )
        self.controller.start()
        rows = [RequestSeen(T0 - 1, ModelName(f"m{i}")) for i in range(5) for _ in range(10 * (i + 1))]
        streams.writer().append(Topic.REQUESTS, [(row.model, encode(RequestMessage.of(row))) for row in rows])

    def ordered(self, *held: HeldWeights, reserve_bytes: int = 0, pinned: str = "") -> list[str]:
        known = tuple(KnownWeights(f"m{i}", "v", 1_000_000, 0.01, pinned=f"m{i}" == pinned) for i in range(5))
        memory = Memory(5_000_000, sum(h.bytes for h in held), reserve_bytes=reserve_bytes)
        report = NodeReport(NODE, self.clock.now_s(), memory, 3.5e9, held=held, known=known)
        self.state.write({records.node_key(NODE, "report"): records.encode(report)})
        self.controller.step()
        raw = self.state.read(records.node_key(NODE, "plan"))
        assert raw is not None
        self.plan = records.decode_plan(raw)
        return sorted(str(d.key.model) for d in self.plan.desired if d.order is not None)

    def skipped(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("prefetcher_skipped_total", {"what": "prefetch", "reason": reason}) or 0.0


def held(model: str, **more: Any) -> HeldWeights:
    return msgspec.structs.replace(HeldWeights(model, "v", "host", "ready", 1_000_000, cause="demand"), **more)


def test_a_plan_orders_no_more_for_a_tenant_than_it_may_hold() -> None:
    free = World()
    assert free.ordered() == ["m0", "m1", "m2", "m3", "m4"]
    world = World(TenantQuota("a", ("m[234]",), most_ratio=0.4))
    assert world.ordered() == ["m0", "m1", "m3", "m4"], "the two that are worth most"
    assert world.skipped("tenant_cap") == 1.0
    assert world.plan.quotas == (TenantQuota("a", ("m[234]",), most_ratio=0.4),)


@pytest.mark.parametrize("what", [{"leases": 1}, {"pinned": True}, {"decision_id": "d", "cause": "forecast"}])
def test_what_a_tenant_has_open_pinned_or_unused_counts_and_what_demand_brought_does_not(what: dict[str, Any]) -> None:
    world = World(TenantQuota("a", ("m[234]",), most_bytes=2_000_000))
    assert world.ordered(held("m4")) == ["m0", "m1", "m2", "m3"]
    world = World(TenantQuota("a", ("m[234]",), most_bytes=2_000_000))
    ordered = world.ordered(held("m4", **what), pinned="m4" if "pinned" in what else "")
    assert ordered == ["m0", "m1", "m3"]


def test_prefetches_never_enter_the_reserve() -> None:
    assert World().ordered(reserve_bytes=2_500_000) == ["m3", "m4"]
    world = World()
    assert world.ordered(reserve_bytes=4_500_000) == []
    assert world.skipped("does_not_fit") == 5.0


# --- pins of several holders ---


def test_unpinning_takes_nobody_elses_pin_away(tmp_path: Path) -> None:
    from prefetcher.api.by_hand import Wish

    with Setup() as setup:
        setup.report()
        hands = setup.service.by_hand

        def act(what: str, by: str, until_s: float | None = None) -> Acted:
            return hands.act(what, "m0", Wish(by, until_s=until_s), setup.service.report())[0]

        act("pin", "ops")
        act("pin", "team-a", setup.clock.now_s() + 60.0)
        pins = records.decode_pins(setup.state.read(records.PINS))
        assert [pins["m0"].by, *(other.by for other in pins["m0"].others)] == ["team-a", "ops"]
        refused = act("unpin", "team-b")
        assert (refused.ok, refused.reason) == (False, "pinned_by_other")
        setup.node.acts.clear()
        assert act("unpin", "ops").reason == "pinned_by_others"
        assert setup.node.acts == [], "the node keeps it"
        assert records.decode_pins(setup.state.read(records.PINS))["m0"].by == "team-a"
        act("pin", "ops")
        setup.virtual.advance(61.0)
        setup.report()
        hands.look_after()
        left = records.decode_pins(setup.state.read(records.PINS))["m0"]
        assert (left.by, left.others) == ("ops", ()), "the one whose time is up goes alone"
        assert ("unpin", "m0") not in setup.node.acts
        act("unpin", "ops")
        assert setup.node.acts[-1] == ("unpin", "m0")
        assert records.decode_pins(setup.state.read(records.PINS)) == {}
