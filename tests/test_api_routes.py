"""Where routers are sent: ready beats moving beats placed, bursts are spread, and several endpoints agree, on a real state server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from api_kit import T0, Setup

from prefetcher.api.fleet import Fleet
from prefetcher.api.keys import Access
from prefetcher.api.routing import INTENT_S, Routed, RouteDesk
from prefetcher.clock import VirtualClock
from prefetcher.config import ApiSettings
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, UnavailableError
from prefetcher.ports import StateStore
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

GB = 10**9
MODELS = [f"m{i}" for i in range(10)]
NODES = [f"node-{n}" for n in range(8)]


def node_report(
    node: str,
    held: Sequence[records.HeldWeights] = (),
    queued: Sequence[records.QueuedWeights] = (),
    at_s: float = T0,
    models: Sequence[str] = MODELS,
) -> records.NodeReport:
    known = tuple(records.KnownWeights(model, "v", 14 * GB, 4.0) for model in models)
    memory = records.Memory(100 * GB, sum(h.bytes for h in held))
    return records.NodeReport(node, at_s, memory, 3.5e9, held=tuple(held), known=known, queued=tuple(queued))


def held(model: str, state: str = "ready", done: int = 14 * GB, leases: int = 0) -> records.HeldWeights:
    return records.HeldWeights(model, "v", "host", state, 14 * GB, done, leases=leases)


def tell(state: StateStore, *reports: records.NodeReport) -> None:
    for report in reports:
        node = NodeName(report.node)
        state.write({records.node_key(node, "report"): records.encode(report)})
        state.see(records.NODES, node, T0)


class Desk:
    """A desk over reports that a test writes; its view is read anew after `later`."""

    def __init__(self, state: StateStore | None = None, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock(T0)
        self.state = state or MemoryState(self.clock)
        self.desk = RouteDesk(self.state, Fleet(self.state, self.clock), self.clock)

    def later(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)

    def route(self, *models: str) -> list[Routed]:
        return self.desk.route(models)

    def intents(self) -> dict[str, records.Intent]:
        raw = self.state.read(records.INTENTS)
        return {} if raw is None else msgspec.json.decode(raw, type=records.Intents).models


@pytest.fixture
def desk() -> Desk:
    made = Desk()
    tell(made.state, *(node_report(node) for node in NODES))
    return made


def test_ready_beats_moving_beats_placed_beats_the_rest(desk: Desk) -> None:
    placements = records.Placements(T0, T0 + 60.0, homes={"m0": "node-3", "m1": "node-3"})
    desk.state.write({records.PLACEMENTS: records.encode(placements)})
    assert desk.route("m0") == [Routed("m0", "node-3", "placed", 4.0)]
    tell(desk.state, node_report("node-5", [held("m1", "moving", 7 * GB)]), node_report("node-6", [held("m2")]))
    tell(desk.state, node_report("node-7", [held("m2", "moving", 13 * GB)]))
    desk.later()
    assert desk.route("m1", "m2") == [Routed("m1", "node-5", "moving", 1.0), Routed("m2", "node-6", "ready", 0.0)]


def test_a_placement_of_long_ago_counts_no_more(desk: Desk) -> None:
    free = desk.route("m0")[0].node
    other = next(node for node in NODES if node != free)
    fresh = Desk()
    tell(fresh.state, *(node_report(node) for node in NODES))
    fresh.state.write({records.PLACEMENTS: records.encode(records.Placements(T0 - 200.0, T0 - 1.0, homes={"m0": other}))})
    assert fresh.route("m0")[0].node == free


def test_a_burst_is_spread_over_the_idle_and_none_is_told_two_nodes(desk: Desk) -> None:
    busy = [records.QueuedWeights("m9", 10.0, 1, moving=True)]
    tell(desk.state, *(node_report(node, queued=busy) for node in NODES[:4]))
    first = [desk.route(model)[0] for model in MODELS[:4]]
    assert {routed.node for routed in first} == set(NODES[4:])
    assert all(routed.state == "placed" and routed.wait_s == 4.0 for routed in first)
    # A second later they are not in any report yet; who asks again is told the same.
    desk.later()
    again = desk.route(*MODELS[:4])
    assert [(r.node, r.state) for r in again] == [(r.node, "moving") for r in first]
    assert set(desk.intents()) == set(MODELS[:4])
    # The fifth waits behind one of them rather than behind ten seconds.
    fifth = desk.route("m4")[0]
    assert fifth.node in NODES[4:]
    # The link had a second for the first one.
    assert fifth.wait_s == 7.0


def test_a_link_goes_on_while_reports_grow_old(desk: Desk) -> None:
    first = desk.route(*MODELS[:8])
    desk.later(3.0)
    # All eight links have a second left; reports still show none of it.
    ninth = desk.route("m8")[0]
    assert ninth.wait_s == 5.0
    assert {r.wait_s for r in desk.route(*MODELS[:8])} == {1.0}
    desk.later(1.5)
    # Done, as far as can be told.
    assert {r.wait_s for r in desk.route(*(r.model for r in first if r.node != ninth.node))} == {0.0}
    assert desk.route("m8")[0].wait_s == 3.5


def quick_nodes(load_s: float) -> Desk:
    """Four nodes whose loads take so little."""
    desk = Desk()
    for node in NODES[:4]:
        report = node_report(node)
        quick = tuple(msgspec.structs.replace(known, load_s=load_s) for known in report.known)
        tell(desk.state, msgspec.structs.replace(report, known=quick))
    return desk


def test_loads_of_milliseconds_are_spread_too_when_they_are_called_at_once() -> None:
    desk = quick_nodes(0.002)
    told = []
    for model in MODELS[:4]:
        told += desk.route(model)
        desk.later(0.02)
    # Whoever was told has yet to send it: its link is taken until then.
    assert len({routed.node for routed in told}) == 4
    # Then all of them are done with it.
    desk.later(0.1)
    assert desk.route("m4")[0].wait_s == pytest.approx(0.002)


def test_a_node_is_busy_for_as_long_as_what_was_sent_there_takes() -> None:
    desk = quick_nodes(0.3)
    first = {desk.route(model)[0].node for model in MODELS[:4]}
    desk.later(0.25)
    # All four have a little left, which the fifth waits for.
    assert desk.route("m4")[0].wait_s == pytest.approx(0.35)
    desk.later(0.1)
    fifth = desk.route("m5")[0]
    assert fifth.node in first
    assert fifth.wait_s == pytest.approx(0.3)


def test_several_models_in_one_call_are_decided_together(desk: Desk) -> None:
    routed = desk.route(*MODELS[:8])
    assert sorted(r.node for r in routed) == NODES
    assert [r.model for r in routed] == MODELS[:8]


def test_an_intent_ends_when_a_report_shows_its_load_or_its_time_is_up(desk: Desk) -> None:
    node = desk.route("m0")[0].node
    desk.later()
    tell(desk.state, node_report(node, queued=[records.QueuedWeights("m0", 3.0, 1, moving=True)], at_s=T0 + 1.0))
    assert desk.route("m0") == [Routed("m0", node, "moving", 3.0)]
    desk.route("m1")
    assert set(desk.intents()) == {"m1"}
    desk.later(INTENT_S + 1.0)
    desk.route("m2")
    assert set(desk.intents()) == {"m2"}


def test_an_intent_for_a_node_that_went_away_binds_nobody(desk: Desk) -> None:
    node = NodeName(desk.route("m0")[0].node)
    desk.state.delete([records.node_key(node, "report")])
    desk.later()
    assert desk.route("m0")[0].node != node


def test_of_several_ready_copies_the_one_that_fewest_use(desk: Desk) -> None:
    tell(desk.state, node_report("node-1", [held("m0", leases=3)]), node_report("node-2", [held("m0")]))
    assert [desk.route("m0")[0].node for _ in range(3)] == ["node-2"] * 3
    # Three were sent there since: now they are used alike.
    assert {desk.route("m0")[0].node for _ in range(2)} == {"node-1", "node-2"}


def test_several_ready_copies_are_sent_to_by_the_shares_that_are_told(desk: Desk) -> None:
    tell(
        desk.state, node_report("node-1", [held("m0", leases=3)]), node_report("node-2", [held("m0")]), node_report("node-3", [held("m0")])
    )
    told = records.Placements(T0, T0 + 60.0, {}, {"m0": {"node-1": 0.75, "node-2": 0.25}})
    desk.state.write({records.PLACEMENTS: records.encode(told)})
    found = []
    for _ in range(40):
        found += [desk.route("m0")[0].node for _ in range(2)]
        desk.later()
    assert {node: found.count(node) for node in NODES if node in found} == {"node-1": 60, "node-2": 20}
    # They change, and are followed; when they stand no more, the one that fewest use.
    other = records.Placements(T0, T0 + 60.0, {}, {"m0": {"node-3": 1.0}})
    desk.state.write({records.PLACEMENTS: records.encode(other)})
    desk.later()
    assert desk.route("m0")[0].node == "node-3"
    desk.later(60.0)
    tell(desk.state, *(node_report(f"node-{n}", [held("m0", leases=leases)]) for n, leases in ((1, 3), (2, 0), (3, 1))))
    desk.later()
    assert desk.route("m0")[0].node == "node-2"


def test_a_model_that_fits_nowhere_goes_where_it_is_served_soonest_uncached(desk: Desk) -> None:
    full = [records.HeldWeights("m8", "v", "host", "ready", 95 * GB, 95 * GB, pinned=True)]
    tell(desk.state, *(node_report(node, full) for node in NODES))
    routed = desk.route("m0")[0]
    assert routed.state == "placed"
    assert not routed.cached


def test_unknown_models_and_a_silent_fleet(desk: Desk) -> None:
    with pytest.raises(ModelNotFoundError, match="'nobody'"):
        desk.route("m0", "nobody")
    with pytest.raises(UnavailableError, match="every node"):
        Desk().route("m0")


def test_what_is_stored_and_is_no_record_is_written_anew(desk: Desk) -> None:
    desk.state.write({records.INTENTS: b"[1", records.PLACEMENTS: b'{"at_s": "x"}'})
    node = desk.route("m0")[0].node
    assert desk.intents()["m0"].node == node


class Away(MemoryState):
    away = False

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.away:
            raise UnavailableError("the state store is away")
        return super().read_many(keys)


def test_while_the_store_is_away_an_endpoint_remembers_what_it_told_itself() -> None:
    clock = VirtualClock(T0)
    state = Away(clock)
    desk = Desk(state, clock)
    tell(state, *(node_report(node) for node in NODES))
    first = [desk.route(model)[0].node for model in MODELS[:2]]
    state.away = True
    more = [desk.route(model)[0].node for model in MODELS[:4]]
    assert more[:2] == first
    assert len(set(more)) == 4
    desk.later(records.REPORT_EXPIRES_S + 1.0)
    with pytest.raises(UnavailableError):
        desk.route("m0")


# --- several endpoints, a real server ---


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(Path(tmp_path_factory.mktemp("state")))
    server.start()
    yield server.url
    server.stop()


def test_endpoints_that_are_asked_at_once_agree(server_url: str) -> None:
    """Four endpoints, each asked from eight threads for ten cold models: one node each, no two on one while another is idle."""
    stores = [RedisState(server_url) for _ in range(4)]
    try:
        stores[0].delete([records.INTENTS, records.PLACEMENTS])
        tell(stores[0], *(node_report(node) for node in NODES))
        clock = VirtualClock(T0)
        desks = [Desk(store, clock) for store in stores]
        start = threading.Barrier(32)

        def ask(number: int) -> list[Routed]:
            start.wait()
            return [desks[number % 4].route(MODELS[(number + i) % 8])[0] for i in range(8)]

        with ThreadPoolExecutor(32) as threads:
            answers = [routed for found in threads.map(ask, range(32)) for routed in found]
        told = {model: {r.node for r in answers if r.model == model} for model in MODELS[:8]}
        assert all(len(nodes) == 1 for nodes in told.values()), told
        assert {node for nodes in told.values() for node in nodes} == set(NODES)
        assert {model: intent.node for model, intent in desks[0].intents().items()} == {m: nodes.pop() for m, nodes in told.items()}
        assert len(answers) == 256
    finally:
        for store in stores:
            store.close()


# --- over HTTP ---


@pytest.fixture
def setup() -> Iterator[Setup]:
    with Setup() as made:
        made.report(*(node_report(node) for node in NODES[:3]))
        yield made


def test_one_and_several_over_http(setup: Setup) -> None:
    one = setup.http.get("/v1/route/m0")
    assert one.status_code == 200
    assert one.headers["cache-control"] == "no-store"
    assert one.json() == {"model": "m0", "node": one.json()["node"], "state": "placed", "wait_s": 4.0, "cached": True}
    several = setup.http.post("/v1/route", json={"models": ["m0", "m1", "m2"]}).json()["routes"]
    assert [r["model"] for r in several] == ["m0", "m1", "m2"]
    assert several[0]["node"] == one.json()["node"]
    assert len({r["node"] for r in several}) == 3


def test_names_with_slashes_are_names(setup: Setup) -> None:
    setup.report(node_report("node-0", models=["org/m1"]))
    assert setup.http.get("/v1/route/org%2Fm1").json()["node"] == "node-0"
    assert setup.http.get("/v1/route/org/m1").json()["model"] == "org/m1"


def test_what_is_refused_over_http(setup: Setup) -> None:
    assert setup.http.get("/v1/route/nobody").status_code == 404
    assert setup.http.post("/v1/route", json={"models": ["m0", "nobody"]}).status_code == 404
    for body in ({}, {"models": []}, {"models": [""]}, {"models": ["m0"] * 101}, {"models": ["m0"], "more": 1}, []):
        assert setup.http.post("/v1/route", json=body).status_code == 400, body
    with Setup() as silent:
        answer = silent.http.get("/v1/route/m0")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


def test_where_there_are_keys_routers_need_one_that_stands_in_no_page(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    router = {"name": "router", "key": "k" * 20, "roles": ["ingest"]}
    page = {"name": "page", "key": "p" * 20, "roles": ["hint"], "origins": ["*"]}
    keys.write_bytes(msgspec.json.encode([router, page]))
    keys.chmod(0o600)
    clock = VirtualClock(T0)
    with Setup(clock=clock, access=Access.of(ApiSettings(keys_file=keys), clock)) as setup:
        setup.report(node_report("node-0"))
        assert setup.http.get("/v1/route/m0").status_code == 401
        assert setup.http.get("/v1/route/m0", headers={"X-Api-Key": "p" * 20}).status_code == 403
        assert setup.http.post("/v1/route", json={"models": ["m0"]}, headers={"X-Api-Key": "p" * 20}).status_code == 403
        assert setup.http.get("/v1/route/m0", headers={"X-Api-Key": "k" * 20}).json()["node"] == "node-0"
