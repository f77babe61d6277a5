"""The step across nodes: homes, shares, and how what is wanted together is spread. On reports alone, no process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from prefetcher.controller import records
from prefetcher.controller.nodes import Nodes
from prefetcher.controller.placing import Placing, room_of, site_of
from prefetcher.core.link_queue import LinkLoad
from prefetcher.core.placement_rule import At
from prefetcher.core.rendezvous import by_rendezvous
from prefetcher.core.types import ModelName, NodeName, RequestSeen
from prefetcher_connectors.memory import MemoryState

GB = 10**9
T0 = 1_767_225_600.0
NODES = [NodeName(f"node-{n}") for n in range(4)]
MODELS = [f"m{i}" for i in range(6)]


def report(node: str, held: Sequence[str] = (), models: Sequence[str] = MODELS, **more: object) -> records.NodeReport:
    return records.NodeReport(
        node=node,
        at_s=T0,
        memory=records.Memory(100 * GB, 10 * GB * len(held)),
        link_bytes_per_s=2.5e9,
        held=tuple(records.HeldWeights(m, "v", "host", "ready", 10 * GB, 10 * GB) for m in held),
        known=tuple(records.KnownWeights(m, "v", 10 * GB, 4.0) for m in models),
        **more,  # type: ignore[arg-type]
    )


class Fleet:
    def __init__(self, *reports: records.NodeReport) -> None:
        self.nodes = Nodes(MemoryState(), [])
        self.ordered: dict[str, list[NodeName]] = {}
        self.placing = Placing(self.nodes, 0.002, 600.0, lambda model: self.ordered.get(model, []))
        self.tell(*reports)

    def tell(self, *reports: records.NodeReport) -> None:
        for each in reports:
            self.nodes.take(NodeName(each.node), records.encode(each), T0)
        self.nodes.names = sorted(self.nodes.reports)

    def rows(self, model: str, *nodes: str | None) -> None:
        self.nodes.served([RequestSeen(T0, ModelName(model), node=None if n is None else NodeName(n)) for n in nodes])


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(*(report(node) for node in NODES))


def test_what_becomes_likely_together_gets_a_link_each(fleet: Fleet) -> None:
    fleet.placing.place(dict.fromkeys(MODELS[:4], 0.6))
    homes = [fleet.placing.home(m) for m in MODELS[:4]]
    assert sorted(filter(None, homes)) == NODES
    # As before at the next step, also when one of them becomes likelier.
    fleet.placing.place({**dict.fromkeys(MODELS[:4], 0.6), MODELS[0]: 0.9})
    assert [fleet.placing.home(m) for m in MODELS[:4]] == homes


def test_busy_links_are_left_to_those_who_use_them(fleet: Fleet) -> None:
    busy = records.QueuedWeights("m5", 20.0, 1, moving=True)
    fleet.tell(*(report(node, queued=(busy,)) for node in NODES[:2]))
    fleet.placing.place({"m0": 0.5, "m1": 0.5})
    assert {fleet.placing.home("m0"), fleet.placing.home("m1")} == set(NODES[2:])


def test_what_is_wanted_no_more_goes_back_to_where_hashing_has_it(fleet: Fleet) -> None:
    fleet.placing.place(dict.fromkeys(MODELS[:4], 0.6))
    fleet.placing.place({})
    for model in MODELS:
        assert fleet.placing.home(model) == NODES[by_rendezvous(model, NODES)[0]]


def test_a_model_that_is_there_or_ordered_is_not_placed_anew(fleet: Fleet) -> None:
    fleet.tell(report("node-3", held=["m0"]))
    fleet.ordered["m1"] = [NodeName("node-2")]
    fleet.placing.place({"m0": 0.9, "m1": 0.9})
    assert fleet.placing.home("m0") == "node-3"
    assert fleet.placing.home("m1") == "node-2"


def test_the_home_is_where_requests_go_unless_the_weights_are_at_one_that_gets_nearly_as_many(fleet: Fleet) -> None:
    fleet.rows("m0", "node-1", "node-1", "node-1", "node-2")
    assert fleet.placing.home("m0") == "node-1"
    fleet.tell(report("node-0", held=["m0"]))
    # Nobody is sent to node-0.
    assert fleet.placing.home("m0") == "node-1"
    fleet.tell(report("node-2", held=["m0"]))
    assert fleet.placing.home("m0") == "node-1"
    fleet.rows("m0", "node-2", "node-2")
    assert fleet.placing.home("m0") == "node-2"


def test_rows_that_name_no_node_are_for_the_one_that_has_the_weights(fleet: Fleet) -> None:
    fleet.rows("m0", "node-1", None, None, None)
    assert fleet.placing.home("m0") == "node-1"
    fleet.tell(report("node-0", held=["m0"]))
    assert fleet.placing.home("m0") == "node-0"


def test_a_node_that_goes_silent_is_nobodys_home(fleet: Fleet) -> None:
    fleet.rows("m0", "node-1")
    assert fleet.placing.home("m0") == "node-1"
    del fleet.nodes.reports[NodeName("node-1")]
    assert fleet.placing.home("m0") in {"node-0", "node-2", "node-3"}
    fleet.tell(report("node-1"))
    assert fleet.placing.home("m0") == "node-1"


def test_a_model_that_no_node_can_load_is_at_home_nowhere(fleet: Fleet) -> None:
    assert fleet.placing.home("nobody knows it") is None
    assert fleet.placing.shares("nobody knows it") == {}
    fleet.tell(report("node-2", models=["new"]))
    assert fleet.placing.home("new") == "node-2"


def test_each_node_gets_its_share_of_a_forecast_and_the_others_next_to_nothing(fleet: Fleet) -> None:
    fleet.rows("m0", "node-1", "node-1", "node-1", "node-2")
    assert fleet.placing.shares("m0") == {"node-1": 0.75, "node-2": 0.25}
    found = fleet.placing.shares_at(["m0", "m1"])
    assert found is not None
    np.testing.assert_allclose([found[node][0] for node in NODES], [0.05, 0.75, 0.25, 0.05], rtol=1e-6)
    home = fleet.placing.home("m1")
    assert [found[node][1] for node in NODES] == [1.0 if node == home else np.float32(0.05) for node in NODES]


def test_one_node_alone_gets_everything() -> None:
    alone = Fleet(report("node-0"))
    alone.rows("m0", "gone")
    alone.placing.place({"m0": 0.9})
    assert alone.placing.home("m0") == "node-0"
    assert alone.placing.shares_at(["m0"]) is None


def test_a_second_copy_is_for_rows_that_wait_behind_the_first_and_only_where_it_pays(fleet: Fleet) -> None:
    fleet.rows("m0", *["node-1"] * 20)
    # All of them found it absent there.
    fleet.placing.weigh_copies({"m0": 0.01})
    found = fleet.placing.shares("m0")
    assert found["node-1"] == 0.5
    assert len(found) == 2
    # A model that is hardly used does not pay for ten gigabytes twice.
    fleet.placing.weigh_copies({"m0": 1e-9})
    assert fleet.placing.shares("m0") == {"node-1": 1.0}
    # Nor does one whose rows find it there.
    fleet.tell(report("node-1", held=["m0"]))
    fleet.rows("m0", *["node-1"] * 200)
    fleet.placing.weigh_copies({"m0": 0.01})
    assert fleet.placing.shares("m0") == {"node-1": 1.0}


def test_what_routers_are_told_names_what_was_placed_and_what_is_shared(fleet: Fleet) -> None:
    fleet.rows("m0", "node-1", "node-1", "node-1", "node-2")
    fleet.placing.place({"m1": 0.9})
    fleet.placing.planned(report("node-3", held=["m4"]), {"m4": 2e-12})
    told = fleet.placing.told(T0, T0 + 120.0)
    assert set(told.homes) == {"m1"}
    assert told.shares == {"m0": {"node-1": 0.75, "node-2": 0.25}}
    assert told.rooms["node-3"] == records.NodeRoom(10.0 * GB, 2e-12 * 600.0)
    assert msgspec.json.decode(records.encode(told), type=records.Placements) == told


def test_a_report_as_a_site() -> None:
    queued = (records.QueuedWeights("m1", 3.0, 2, moving=True), records.QueuedWeights("m2", 4.0, 1), records.QueuedWeights("m3", 4.0, 8))
    moving = records.HeldWeights("m1", "v", "host", "moving", 10 * GB, 2 * GB)
    whole = report("node-0", held=["m0"], queued=queued)
    whole = msgspec.structs.replace(whole, held=(*whole.held, moving), memory=records.Memory(100 * GB, 20 * GB))
    site = site_of(whole, dict.fromkeys(MODELS, 4.0))
    assert site.at == {"m0": At.READY, "m1": At.MOVING, "m2": At.MOVING, "m3": At.MOVING}
    # Eight rows go before two, which have three seconds left, and those before one.
    assert site.ready_in_s == {"m3": 4.0, "m1": 7.0, "m2": 11.0}
    # What runs gives way to what is denser, as what waits does.
    assert site.running_s == 0.0
    assert sorted(site.queue) == [(3.0, 2.0), (4.0, 1.0), (4.0, 8.0)]
    # What waits for the link will take its memory.
    assert site.free_bytes == 60 * GB
    assert site.evictable_bytes == 10 * GB
    # Five seconds later the first is there and the second has two left.
    later = site_of(whole, dict.fromkeys(MODELS, 4.0), age_s=5.0)
    assert sorted(later.queue) == [(2.0, 2.0), (4.0, 1.0)]
    assert later.ready_in_s == {"m3": 0.0, "m1": 2.0, "m2": 6.0}
    # Five rows that were sent there two seconds ago, since that report, took the link when the eight were done.
    since = site_of(whole, dict.fromkeys(MODELS, 4.0), age_s=5.0, coming={"m4": LinkLoad(-2.0, 3.0, 5.0)})
    assert since.ready_in_s == {"m3": 0.0, "m4": 2.0, "m1": 5.0, "m2": 9.0}
    # For a guess, all that is asked for goes first.
    guess = site_of(whole, dict.fromkeys(MODELS, 4.0), guesses=True)
    assert (guess.running_s, list(guess.queue)) == (11.0, [])
    # A prefetch that runs yields to demand, and not to another prefetch.
    guess = msgspec.structs.replace(whole, queued=())
    assert site_of(guess, {}).running_s == 0.0
    assert site_of(guess, {}, guesses=True).running_s == 3.2


def test_memory_that_is_leased_or_pinned_is_no_room() -> None:
    held = [records.HeldWeights(f"m{i}", "v", "host", "ready", 10 * GB, 10 * GB, leases=i == 0, pinned=i == 1) for i in range(3)]
    told = msgspec.structs.replace(report("node-0"), held=tuple(held))
    assert room_of(told, {"m0": 1.0, "m1": 1.0, "m2": 1e-12}, 600.0) == records.NodeRoom(10.0 * GB, 6e-10)
    assert room_of(report("node-0"), {}, 600.0) == records.NodeRoom(0.0, 0.0)
