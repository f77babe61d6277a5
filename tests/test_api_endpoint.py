"""The HTTP endpoint over twins: what each route answers, also when a part is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_kit import NODE, T0, Setup
from stream_kit import FullStreams, rows_of

from prefetcher.controller import records
from prefetcher.controller.records import OrderRecord
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.errors import UnavailableError
from prefetcher.ports import Acted
from prefetcher_connectors.memory import MemoryStreams


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(MemoryStreams(), 1000)
    made.report()
    with made:
        yield made


def test_rows_are_taken_in_whole_or_not_at_all(setup: Setup) -> None:
    answer = setup.http.post("/v1/requests", json=[{"model": "a", "ts": T0 - 5, "user": "u"}, {"model": "b", "count": 3}])
    assert (answer.status_code, answer.json()) == (202, {"accepted": 2})
    assert rows_of(setup.streams) == [RequestSeen(T0 - 5, ModelName("a"), user="u"), RequestSeen(T0, ModelName("b"), 3)]
    assert setup.woken == [""]
    refused = setup.http.post("/v1/requests", json=[{"model": "c"}, {"model": "d", "ts": "soon"}, {"model": "e", "count": 0}])
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert [error["field"] for error in refused.json()["errors"]] == ["[1].ts", "[2].count"]
    assert len(rows_of(setup.streams)) == 2


def test_a_body_that_is_nested_deeply() -> None:
    setup = Setup(MemoryStreams(), 100_000)
    answer = setup.http.post("/v1/requests", content=b"[" * 50_000)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert "nested" in answer.json()["detail"]
    assert rows_of(setup.streams) == []


@pytest.mark.parametrize("name", [b'\\ud800', b'\\udc00 and more', b'\\ud800\\u0041', b'\\\\\\ud800'])
def test_half_a_character_is_called_so(setup: Setup, name: bytes) -> None:
    answer = setup.http.post("/v1/requests", content=b'{"model": "' + name + b'"}')
    assert (answer.status_code, "half a character" in answer.json()["detail"]) == (400, True)
    for body in (b'{"model": "a', b'{"model": "\\\\ud800", "ts'):
        assert "truncated" in setup.http.post("/v1/requests", content=body).json()["detail"]
    assert setup.http.post("/v1/requests", content=b'{"model": "\\ud83d\\ude00"}').status_code == 202


@pytest.mark.parametrize("ahead_s", [61.0, 1e9])
def test_times_in_the_future(setup: Setup, ahead_s: float) -> None:
    assert setup.http.post("/v1/requests", json={"model": "a", "ts": T0 + 59}).status_code == 202
    refused = setup.http.post("/v1/requests", json={"model": "a", "ts": T0 + ahead_s})
    assert refused.status_code == 400
    assert refused.json()["errors"][0]["field"] == "ts"


def test_a_body_that_is_too_large_announced_or_not(setup: Setup) -> None:
    big = b'{"model": "' + b"x" * 2000 + b'"}'
    assert setup.http.post("/v1/requests", content=big).status_code == 413
    assert setup.http.post("/v1/requests", content=iter([big[:500], big[500:]])).status_code == 413
    assert rows_of(setup.streams) == []


def test_a_full_disk_is_temporary() -> None:
    streams = FullStreams()
    setup = Setup(streams)
    setup.report()
    answer = setup.http.post("/v1/requests", json={"model": "a"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert setup.metrics.registry.get_sample_value("prefetcher_requests_total", {"source": "http"}) == 0
    assert "the disk is full" in setup.http.get("/healthz").json()["detail"]
    streams.full = False
    assert setup.http.get("/healthz").status_code == 200
    assert setup.http.post("/v1/requests", json={"model": "a"}).status_code == 202


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"model": "x", "count": True}, "count"),
        ({"model": "x", "ts": True}, "ts"),
        ({"model": "x" * 513}, "model"),
        ({"model": "\u20ac" * 171}, "model"),
    ],
)
def test_booleans_are_no_numbers_and_names_have_an_end(setup: Setup, record: dict[str, object], field: str) -> None:
    refused = setup.http.post("/v1/requests", json=record)
    assert refused.status_code == 400
    assert [error["field"] for error in refused.json()["errors"]] == [field]
    assert setup.http.post("/v1/requests", json={"model": "\u20ac" * 170}).status_code == 202


def test_a_long_name_is_not_echoed_whole(setup: Setup) -> None:
    refused = setup.http.post(f"/v1/models/{'x' * 60_000}:pin")
    assert refused.status_code == 404
    assert len(refused.json()["detail"]) < 200


def test_residency_says_why(setup: Setup) -> None:
    held = setup.http.get("/v1/residency", params={"model": "m0"}).json()
    assert held[0]["contributions"] == [["hazard", 0.8]]
    assert setup.http.get("/v1/residency", params={"model": "nobody"}).status_code == 404


def test_orders_are_shown_as_they_stand_newest_first(setup: Setup) -> None:
    def order(number: int, **changes: object) -> bytes:
        facts = {"decision_id": str(number), "node": NODE, "model": f"m{number % 2}", "version": "v", "tier": "host"}
        return records.encode(OrderRecord(**facts, cause="forecast", arm="treated", issued_s=T0 + number, **changes))  # type: ignore[arg-type]

    items = [order(1), order(2), order(1, ready_s=T0 + 2), order(3), order(1, ready_s=T0 + 2, outcome="timely")]
    setup.state.append(records.node_key(NODE, "orders"), items, records.ORDERS_KEPT)
    found = setup.http.get("/v1/orders").json()
    assert [(o["decision_id"], o.get("outcome", "open")) for o in found] == [("1", "timely"), ("3", "open"), ("2", "open")]
    assert [o["decision_id"] for o in setup.http.get("/v1/orders", params={"model": "m0"}).json()] == ["2"]
    assert len(setup.http.get("/v1/orders", params={"count": 1}).json()) == 1
    assert setup.http.get("/v1/orders", params={"count": 0}).status_code == 400


def test_acts_by_hand(setup: Setup) -> None:
    answer = setup.http.post("/v1/models/org/m1:pin")
    record = answer.json().pop("record")
    assert answer.json() == {"model": "org/m1", "act": "pin", "ok": True, "reason": "loading", "record": record}
    assert records.decode_pins(setup.state.read(records.PINS)) == {"org/m1": records.Pin("", T0)}
    assert setup.http.post("/v1/models/org/m1:unpin").status_code == 200
    assert records.decode_pins(setup.state.read(records.PINS)) == {}
    assert setup.http.post("/v1/models/nobody:load").status_code == 404
    setup.node.answer = Acted(False, "leased")
    refused = setup.http.post("/v1/models/m0:evict")
    assert refused.status_code == 409
    assert "try again once that closed it" in refused.json()["detail"]
    assert setup.node.acts == [("pin", "org/m1"), ("unpin", "org/m1"), ("evict", "m0")]
    assert setup.http.post("/v1/models/m0:explode").status_code == 404


def test_off_and_on(setup: Setup) -> None:
    assert setup.http.get("/v1/status").json()["prefetching"]
    assert not setup.http.post("/v1/off").json()["prefetching"]
    assert not setup.node.on
    assert not setup.http.get("/v1/status").json()["prefetching"]
    assert setup.http.post("/v1/on").json()["prefetching"]
    assert setup.node.on
    assert setup.woken == ["switch", "switch"]


def test_health_names_what_is_wrong(setup: Setup) -> None:
    assert setup.http.get("/healthz").status_code == 200
    setup.node.problem = "the agent's loop does not move"
    setup.controller_problem = "another controller leads"
    sick = setup.http.get("/readyz")
    assert sick.status_code == 503
    assert sick.headers["retry-after"] == "1"
    assert "loop" in sick.json()["detail"]
    assert "leads" in sick.json()["detail"]


def test_a_silent_node_is_unavailable(setup: Setup) -> None:
    setup.virtual.advance(records.REPORT_EXPIRES_S + 1)
    for path in ("/v1/status", "/v1/residency", "/healthz"):
        answer = setup.http.get(path)
        assert answer.status_code == 503
        assert "not reported" in answer.json()["detail"]


def test_the_state_store_is_away(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(key: str) -> bytes | None:
        raise UnavailableError("the state server does not answer", retry_after_s=2.0)

    monkeypatch.setattr(setup.state, "read", away)
    assert setup.http.get("/v1/status").status_code == 503
    assert setup.http.post("/v1/requests", json={"model": "a"}).status_code == 202


def test_the_schema_has_examples(setup: Setup) -> None:
    schema = setup.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/requests"]["post"]["requestBody"]["content"]["application/json"]
    for example in body["examples"].values():
        assert setup.http.post("/v1/requests", json=example["value"]).status_code == 202
    assert set(schema["paths"]) >= {"/v1/residency", "/v1/orders", "/v1/report", "/v1/status", "/v1/off", "/v1/on", "/metrics"}


def test_every_route_is_in_the_reference(setup: Setup) -> None:
    from pathlib import Path

    import prefetcher

    page = (Path(prefetcher.__file__).parent / "docs" / "http.md").read_text()
    paths = [path.replace("{model}", "{model}") for path in setup.http.get("/openapi.json").json()["paths"]]
    assert [path for path in paths if path not in page] == []
