"""What is where, on all nodes; forecasts; orders and reports of one node and of all; and how often the store is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from api_kit import NODE, T0, Setup, report_of

from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights, OrderRecord
from prefetcher.core.types import NodeName
from prefetcher.errors import UnavailableError
from prefetcher_connectors.memory import MemoryState

READY = HeldWeights("m0", "v", "host", "ready", 1000, 1000)
MOVING = HeldWeights("m0", "v", "host", "moving", 1000, 400)


class Counting(MemoryState):
    reads = 0
    away = False

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        if self.away:
            raise UnavailableError("the state server does not answer")
        return super().read_many(keys)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    made.report(report_of(held=[READY]), report_of("node-1", [MOVING]), report_of("node-2"))
    with made:
        yield made


def test_every_node_and_when_it_is_ready(setup: Setup) -> None:
    found = setup.http.get("/v1/residency", params={"model": "m0"}).json()
    assert [(e["node"], e["tier"], e["state"], e["bytes_done"], e["ready_in_s"]) for e in found] == [
        ("node-0", "host", "ready", 1000, 0.0),
        ("node-1", "host", "moving", 400, 0.6),
        ("node-2", "disk", "absent", 0, 1.0),
    ]
    assert [(e["node"], e["state"]) for e in setup.http.get("/v1/residency").json()] == [("node-0", "ready"), ("node-1", "moving")]
    assert [e["state"] for e in setup.http.get("/v1/residency", params={"model": "org/m1"}).json()] == ["absent"] * 3
    assert setup.http.get("/v1/residency", params={"model": "nobody"}).status_code == 404


def test_memory_that_is_given_back_has_no_time() -> None:
    with Setup() as setup:
        setup.report(report_of(held=[HeldWeights("m0", "v", "host", "evicting", 1000, 1000)]))
        assert setup.http.get("/v1/residency").json()[0]["ready_in_s"] is None


def test_entity_tags(setup: Setup) -> None:
    first = setup.http.get("/v1/residency")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "max-age=1"
    assert tag.startswith('"')
    for header in (tag, f'"x", {tag}', "*", f"W/{tag}"):
        again = setup.http.get("/v1/residency", headers={"If-None-Match": header})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    setup.virtual.advance(1.0)
    setup.report(report_of(held=[READY]), report_of("node-1", [MOVING]), report_of("node-2"))
    assert setup.http.get("/v1/residency", headers={"If-None-Match": tag}).status_code == 304, "another report, the same content"
    setup.virtual.advance(1.0)
    setup.report(report_of("node-1", [READY]))
    changed = setup.http.get("/v1/residency", headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    assert setup.http.get("/v1/residency", params={"model": "m0"}).headers["etag"] != changed.headers["etag"]


def test_the_store_is_asked_once_a_second_at_most() -> None:
    state = Counting()
    with Setup(state=state) as setup:
        setup.report()
        for _ in range(1000):
            assert setup.http.get("/v1/residency").status_code == 200
        assert state.reads == 1
        setup.virtual.advance(1.0)
        setup.http.get("/v1/residency")
        assert state.reads == 2


def test_what_was_read_last_stands_while_the_store_is_away() -> None:
    state = Counting()
    with Setup(state=state) as setup:
        setup.report()
        setup.http.get("/v1/residency")
        state.away = True
        setup.virtual.advance(4.0)
        assert setup.http.get("/v1/residency").status_code == 200
        setup.virtual.advance(1.0)
        for _ in range(10):
            assert setup.http.get("/v1/residency").status_code == 503
        assert state.reads == 3, "not more than once a second"


def test_forecasts(setup: Setup) -> None:
    assert setup.http.get("/v1/forecast/m0").status_code == 503
    setup.virtual.advance(1.0)
    setup.report(report_of())
    setup.forecast(**{"m0": (0.1, 0.2, 0.3), "org/m1": (0.0, 0.0, 0.1)})
    assert setup.http.get("/v1/forecast/org/m1").json() == {
        "model": "org/m1",
        "issued_at_s": T0,
        "valid_until_s": T0 + 120,
        "probabilities": {"120": 0.0, "600": 0.0, "3600": 0.1},
    }
    unknown = setup.http.get("/v1/forecast/nobody")
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
    setup.virtual.advance(120.5)
    stale = setup.http.get("/v1/forecast/m0")
    assert (stale.status_code, stale.headers["retry-after"]) == (503, "5")


def write_orders(setup: Setup) -> None:
    for number, node in enumerate(("node-0", "node-1", "node-0")):
        order = OrderRecord(str(number), node, "m0", "v", "host", "forecast", "treated", T0 + number)
        setup.state.append(records.node_key(NodeName(node), "orders"), [records.encode(order)], 100)


def test_orders_of_this_node_of_another_and_of_all(setup: Setup) -> None:
    write_orders(setup)

    def ids(**params: str) -> list[str]:
        return [order["decision_id"] for order in setup.http.get("/v1/orders", params=params).json()]

    assert ids() == ["2", "0"]
    assert ids(node="node-1") == ["1"]
    assert ids(node="*") == ["2", "1", "0"]
    assert ids(node="*", count="2") == ["2", "1"]
    assert setup.http.get("/v1/orders", params={"node": "nobody"}).status_code == 404
    elsewhere = Setup(state=setup.state, clock=setup.clock, node=None)
    write_orders(elsewhere)
    with elsewhere:
        assert [order["decision_id"] for order in elsewhere.http.get("/v1/orders").json()] == ["2", "1", "0"]
        assert elsewhere.http.get("/v1/status").json()["node"]["node"] == "node-0"
        assert elsewhere.http.get("/v1/status", params={"node": "node-1"}).json()["nodes"] == ["node-0", "node-1", "node-2"]
        assert elsewhere.http.get("/healthz").status_code == 200


def test_reports_add_up(setup: Setup) -> None:
    parts = {
        "node-0": {
            "rows": 3,
            "outcomes": {"timely": 1, "useless": 2},
            "accuracy": 1 / 3,
            "timeliness": 1.0,
            "by_arm": {"treated": {"rows": 3}},
        },
        "node-1": {"rows": 4, "outcomes": {"late": 1}, "accuracy": 1.0, "timeliness": 0.0, "by_arm": {"control": {"rows": 4}}},
    }
    for node, part in parts.items():
        setup.state.write({records.node_key(NodeName(node), "totals"): records.encode(part)})
    assert setup.http.get("/v1/report").json() == parts[NODE]
    assert setup.http.get("/v1/report", params={"node": "node-1"}).json() == parts["node-1"]
    assert setup.http.get("/v1/report", params={"node": "node-2"}).json() == {}
    every = setup.http.get("/v1/report", params={"node": "*"}).json()
    assert every["nodes"] == parts
    assert every["sum"] == {
        "rows": 7,
        "outcomes": {"timely": 1, "useless": 2, "late": 1},
        "by_arm": {"treated": {"rows": 3}, "control": {"rows": 4}},
        "accuracy": 0.5,
        "timeliness": 0.5,
    }
    assert setup.http.get("/v1/report", params={"node": "nobody"}).status_code == 404


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2/x", 404), ("GET", "/v1/requests", 405), ("DELETE", "/v1/hints", 405)])
def test_what_is_not_there_is_a_problem_too(setup: Setup, method: str, path: str, status: int) -> None:
    answer = setup.http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["status"] == status
    if status == 405:
        assert answer.headers["allow"] == "POST"


def test_what_nobody_foresaw_is_a_problem_without_its_insides(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(node: str | None) -> dict[str, object]:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(setup.service, "totals", broken)
    answer = setup.http.get("/v1/report")
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/problem+json")
    assert "secret" not in answer.text
