"""What people do by hand: with an end, with a name and a reason, on one node or all; and the switch of nodes, groups and all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_kit import NODE, T0, ByHand, Setup, report_of

from prefetcher.api.by_hand import ByHand as Desk
from prefetcher.api.by_hand import Wish
from prefetcher.api.fleet import Fleet
from prefetcher.api.keys import Access, Caller
from prefetcher.clock import SystemClock
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights
from prefetcher.core.types import NodeName
from prefetcher.ports import Acted, StateStore
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

OPS = "sk_ops-0123456789abc"


class Elsewhere:
    """Other nodes, as they are reached."""

    def __init__(self) -> None:
        self.nodes: dict[NodeName, ByHand] = {}

    def __call__(self, node: NodeName) -> ByHand:
        return self.nodes.setdefault(node, ByHand())


@pytest.fixture
def others() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def setup(others: Elsewhere) -> Iterator[Setup]:
    made = Setup(reach=others, group="canary")
    made.report(report_of(), report_of("node-1"))
    with made:
        yield made


def pins(setup: Setup) -> dict[str, records.Pin]:
    return records.decode_pins(setup.state.read(records.PINS))


def switch(setup: Setup, key: str) -> records.Switch:
    raw = setup.state.read(key)
    assert raw is not None
    import msgspec

    return msgspec.json.decode(raw, type=records.Switch)


# --- acts with an end ---


@pytest.mark.parametrize("in_query", [True, False])
@pytest.mark.parametrize("wish", [{"until_s": T0 + 60, "reason": "noon"}, {"for_s": 60, "reason": "noon"}])
def test_a_pin_with_an_end(setup: Setup, wish: dict[str, Any], in_query: bool) -> None:
    answer = setup.http.post("/v1/models/m0:pin", params=wish) if in_query else setup.http.post("/v1/models/m0:pin", json=wish)
    assert answer.status_code == 200
    record = {"act": "pin", "model": "m0", "node": NODE, "group": "", "by": "", "at_s": T0, "until_s": T0 + 60, "reason": "noon"}
    assert answer.json()["record"] == record
    assert pins(setup) == {"m0": records.Pin("", T0, T0 + 60)}
    assert setup.http.get("/v1/by-hand").json() == [record]
    setup.service.by_hand.look_after()
    assert pins(setup)
    setup.virtual.advance(60.0)
    setup.report(report_of())
    setup.woken.clear()
    setup.service.by_hand.look_after()
    assert pins(setup) == {}
    assert setup.node.acts == [("pin", "m0"), ("unpin", "m0")]
    assert setup.woken == ["unpin"]


def test_a_pin_that_was_renewed_stays(setup: Setup) -> None:
    setup.http.post("/v1/models/m0:pin", json={"for_s": 60})
    setup.virtual.advance(30.0)
    setup.report(report_of())
    setup.http.post("/v1/models/m0:pin")
    setup.virtual.advance(31.0)
    setup.report(report_of())
    setup.service.by_hand.look_after()
    assert pins(setup) == {"m0": records.Pin("", T0 + 30, None)}


def test_what_was_unpinned_elsewhere_is_unpinned_here(setup: Setup, others: Elsewhere) -> None:
    setup.http.post("/v1/models/m0:pin")
    setup.service.by_hand.look_after()
    elsewhere = Setup(state=setup.state, clock=setup.clock, node=NodeName("node-1"))
    with elsewhere:
        assert elsewhere.http.post("/v1/models/m0:unpin").status_code == 200
    setup.service.by_hand.look_after()
    assert setup.node.acts == [("pin", "m0"), ("unpin", "m0")]


def test_what_is_unpinned_on_one_node_is_unpinned_where_it_still_is(setup: Setup, others: Elsewhere) -> None:
    setup.http.post("/v1/models/m0:pin")
    setup.service.by_hand.look_after()
    setup.virtual.advance(1.0)
    held = [HeldWeights("m0", "v", "host", "ready", 1000, pinned=True)]
    setup.report(report_of(held=held), report_of("node-1", held), report_of("node-2"))
    setup.http.post("/v1/models/m0:unpin")
    setup.service.by_hand.look_after()
    assert {node: found.acts for node, found in others.nodes.items()} == {"node-1": [("unpin", "m0")]}
    setup.service.by_hand.look_after()
    assert len(others.nodes[NodeName("node-1")].acts) == 1


def test_pins_of_older_versions_have_no_end(setup: Setup) -> None:
    setup.state.write({records.PINS: b'["m0"]'})
    setup.service.by_hand.look_after()
    setup.http.post("/v1/models/org/m1:pin")
    assert pins(setup) == {"m0": records.Pin(), "org/m1": records.Pin("", T0)}


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        ("/v1/models/m0:pin", {"until_s": T0 - 1}),
        ("/v1/models/m0:pin", {"until_s": T0 + 1, "for_s": 1}),
        ("/v1/models/m0:pin", {"for_s": 0}),
        ("/v1/models/m0:pin", {"for_s": True}),
        ("/v1/models/m0:pin", {"for_s": "soon"}),
        ("/v1/models/m0:pin", {"surprise": 1}),
        ("/v1/models/m0:pin", [1]),
        ("/v1/models/m0:load", {"for_s": 60}),
        ("/v1/models/m0:evict", {"for_s": 60}),
        ("/v1/off", {"node": "node-1", "group": "canary"}),
        ("/v1/off", {"until_s": 60}),
    ],
)
def test_wishes_that_are_refused(setup: Setup, path: str, wish: Any) -> None:
    refused = setup.http.post(path, json=wish)
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/problem+json")
    assert setup.node.acts == []
    assert setup.http.get("/v1/by-hand").json() == []


def test_an_act_on_another_node(setup: Setup, others: Elsewhere) -> None:
    assert setup.http.post("/v1/models/m0:load", params={"node": "node-1"}).json()["record"]["node"] == "node-1"
    assert others.nodes[NodeName("node-1")].acts == [("load", "m0")]
    assert setup.node.acts == []
    assert setup.http.post("/v1/models/m0:load", params={"node": "nobody"}).status_code == 404


def test_what_was_refused_is_not_in_the_list(setup: Setup) -> None:
    setup.node.answer = Acted(False, "leased")
    assert setup.http.post("/v1/models/m0:evict").status_code == 409
    assert setup.http.get("/v1/by-hand").json() == []


def test_who_did_it_is_the_name_of_the_key() -> None:
    import hashlib

    clock = SystemClock()
    access = Access(clock, [(hashlib.sha256(OPS.encode()).digest(), Caller("ops", frozenset({"operator"})))])
    with Setup(access=access) as setup:
        setup.report(report_of())
        headers = {"X-Api-Key": OPS}
        setup.http.post("/v1/models/m0:pin", headers=headers)
        setup.http.post("/v1/off", headers=headers, json={"reason": "fire"})
        done = setup.http.get("/v1/by-hand", headers=headers, params={"count": 2}).json()
        assert [(entry["act"], entry["by"], entry["reason"]) for entry in done] == [("off", "ops", "fire"), ("pin", "ops", "")]
        assert pins(setup)["m0"].by == "ops"


def test_the_last_thousand_are_kept() -> None:
    state = MemoryState()
    for number in range(1_010):
        state.append(records.BY_HAND, [records.encode(records.ByHand("load", float(number), ""))], records.BY_HAND_KEPT)
    with Setup(state=state) as setup:
        assert len(setup.http.get("/v1/by-hand", params={"count": 1000}).json()) == 1000


# --- the switch ---


def test_a_switch_of_one_node_of_a_group_and_of_all(setup: Setup, others: Elsewhere) -> None:
    def mode() -> str:
        return str(setup.http.get("/v1/status").json()["mode"])

    assert setup.http.post("/v1/off", json={"node": "node-1"}).status_code == 200
    assert mode() == "on"
    assert setup.http.get("/v1/status", params={"node": "node-1"}).json()["mode"] == "off"
    assert setup.http.post("/v1/observe", json={"group": "canary"}).json()["mode"] == "observe"
    assert mode() == "observe"
    assert setup.http.get("/v1/status").json()["observe"]
    assert setup.http.post("/v1/off").json() == {
        "prefetching": False,
        "mode": "off",
        "record": {"act": "off", "at_s": T0, "by": "", "model": "", "node": "", "group": "", "until_s": None, "reason": ""},
    }
    assert mode() == "off"
    assert not setup.node.on
    assert setup.http.post("/v1/on").status_code == 200
    assert mode() == "observe", "the strictest counts"
    setup.http.post("/v1/on", json={"group": "canary"})
    assert mode() == "on"
    assert NodeName("node-1") in others.nodes, "nodes elsewhere are told to look"
    assert setup.http.post("/v1/off", json={"node": "nobody"}).status_code == 404


def test_a_group_is_known_by_the_nodes_that_report_or_by_its_switch(setup: Setup) -> None:
    setup.report(report_of(), report_of("node-1", group="rack-7"))
    refused = setup.http.post("/v1/off", json={"group": "ghost"})
    assert refused.status_code == 404
    assert refused.json()["detail"] == "no node that reports is of group 'ghost'; groups: rack-7"
    assert setup.http.get("/v1/by-hand").json() == []
    assert setup.http.post("/v1/off", json={"group": "rack-7"}).status_code == 200
    setup.state.delete([records.node_key(NodeName("node-1"), "report")])
    assert setup.http.post("/v1/on", json={"group": "rack-7"}).status_code == 200, "its nodes are down, its switch is there"


def test_a_switch_with_an_end(setup: Setup) -> None:
    setup.http.post("/v1/off", json={"for_s": 60})
    setup.http.post("/v1/observe", json={"node": "node-1", "for_s": 60})
    setup.service.by_hand.look_after()
    assert setup.service.by_hand.mode() == "off"
    setup.virtual.advance(60.0)
    setup.report(report_of(), report_of("node-1"))
    setup.service.by_hand.look_after()
    assert setup.service.by_hand.mode() == setup.service.by_hand.mode(NodeName("node-1")) == "on"
    assert setup.node.on
    assert setup.woken[-1] == "switch"


def test_an_end_does_not_undo_what_came_after_it(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.http.post("/v1/off", json={"for_s": 60})
    setup.virtual.advance(60.0)
    setup.report(report_of())
    read_many = setup.state.read_many

    def read_and_then_somebody_acts(keys: Any) -> list[bytes | None]:
        found = read_many(keys)
        if records.PINS in keys:
            setup.state.write({records.SWITCH: records.encode(records.Switch(on=False, by="fire"))})
        return found

    monkeypatch.setattr(setup.state, "read_many", read_and_then_somebody_acts)
    setup.service.by_hand.look_after()
    assert switch(setup, records.SWITCH) == records.Switch(on=False, by="fire")


# --- several processes ---


@pytest.fixture(params=["server", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], StateStore]]:
    """Opens the same store, for one process more."""
    if request.param == "memory":
        state = MemoryState()
        yield lambda: state
        return
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    made: list[RedisState] = []

    def another() -> RedisState:
        made.append(RedisState(server.url))
        return made[-1]

    yield another
    for store in made:
        store.close()
    server.stop()


def test_no_pin_is_lost_among_processes(opened: Callable[[], StateStore]) -> None:
    clock = SystemClock()
    names = [f"m{number}" for number in range(40)]
    report = report_of(known=names)
    together = threading.Barrier(4)

    def desk() -> Desk:
        state = opened()
        return Desk(NODE, "", ByHand(), None, state, Fleet(state, clock, NODE), clock, Metrics(), lambda reason: None)

    def pin(mine: list[str]) -> None:
        acting = desk()
        together.wait()
        for name in mine:
            acting.act("pin", name, Wish("somebody"), report)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(pin, [names[i::4] for i in range(4)]))
    assert sorted(records.decode_pins(opened().read(records.PINS))) == sorted(names)


def test_records_are_plain_json(setup: Setup) -> None:
    setup.http.post("/v1/models/m0:pin", json={"for_s": 60})
    assert json.loads(setup.state.read(records.PINS) or b"") == {"m0": {"at_s": T0, "until_s": T0 + 60}}
