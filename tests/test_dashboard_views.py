"""What the dashboard asks for, without a browser: pages of nodes and models, loads, findings, one model's story, events, and files."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api_kit import NODE, T0, Setup, report_of
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.api.keys import Access
from prefetcher.clock import VirtualClock
from prefetcher.config import ApiSettings
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights, OrderRecord
from prefetcher.core.types import Arm, Cause, DecisionId, DesiredWeights, ModelName, ModelVersion, NodeName, Order, Plan, Tier, WeightsKey
from prefetcher.dashboard.assets import PAGE_HEADERS, asset, assets
from prefetcher.dashboard.events import Events
from prefetcher.dashboard.memo import Memo
from prefetcher.dashboard.past import Past, band_of, count_band
from prefetcher.dashboard.views import STATES, state_of
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader, connect, key
from prefetcher_connectors.redis import EmbeddedServer

GB = 10**9


def held(model: str, state: str = "ready", **more: object) -> HeldWeights:
    return HeldWeights(model, "v", "host", state, 1000, 400 if state == "moving" else 1000, **more)  # type: ignore[arg-type]


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(node=None)
    copies = [
        held("a", leases=1, last_use_s=T0),
        held("b", pinned=True, last_use_s=T0),
        held("c", last_use_s=T0 - 50),
        held("d", decision_id="x", cause="forecast"),
        held("e", "moving", cause="demand"),
        held("f", "evicting"),
        HeldWeights("p", "v", "host", "part", 4000, 1000),
    ]
    made.report(
        report_of("one", copies, known=("a", "b", "c", "d", "e", "f"), busy_ratio=0.5, group="red"),
        report_of("two", [held("a", last_use_s=T0 - 5)], known=("a", "Big/Model"), observe=True),
        report_of("three", problems=("its disk is full",), known=("big/other",)),
    )
    with made:
        yield made


# --- pages of nodes and models ---


def test_a_nodes_bytes_by_state_add_up(setup: Setup) -> None:
    (one,) = (node for node in setup.http.get("/v1/nodes").json()["nodes"] if node["node"] == "one")
    assert one["tiers"]["host"]["states"] == dict.fromkeys(STATES, 1000)
    assert (one["held"], one["moving"], one["waited_for"], one["disk"]["models"]) == (7, 1, 1, 6)
    assert "device" not in one["tiers"]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["three", "one", "two"]),
        ({"sort": "name"}, ["one", "three", "two"]),
        ({"sort": "moving", "limit": "1"}, ["one"]),
        ({"sort": "name", "offset": "1", "limit": "1"}, ["three"]),
        ({"matches": "RED"}, ["one"]),
        ({"matches": "t", "sort": "name"}, ["three", "two"]),
        ({"state": "problem"}, ["three"]),
        ({"state": "moving"}, ["one"]),
        ({"state": "off"}, ["two"]),
        ({"matches": "nobody"}, []),
    ],
)
def test_nodes_are_sorted_filtered_and_cut_by_the_endpoint(setup: Setup, query: dict[str, str], names: list[str]) -> None:
    found = setup.http.get("/v1/nodes", params=query).json()
    assert [node["node"] for node in found["nodes"]] == names
    assert found["total"] == 3
    assert found["matched"] == (3 if set(query) <= {"sort", "offset", "limit"} else len(names))


@pytest.mark.parametrize(
    "query", [{"sort": "best"}, {"limit": "0"}, {"limit": "201"}, {"offset": "-1"}, {"state": "x"}, {"matches": "x" * 201}]
)
def test_what_is_no_page_is_refused(setup: Setup, query: dict[str, str]) -> None:
    assert setup.http.get("/v1/nodes", params=query).status_code == 400


def test_sums_are_of_all_that_match_and_not_of_the_page(setup: Setup) -> None:
    whole = setup.http.get("/v1/nodes", params={"limit": "1"}).json()["sums"]
    assert whole["budget_bytes"] == 30_000
    assert whole["states"]["used"] == 2000


def test_models_that_begin_with_what_is_asked_come_first_then_those_used_last(setup: Setup) -> None:
    def names(**query: str) -> list[str]:
        return [line["model"] for line in setup.http.get("/v1/models", params=query).json()["models"]]

    assert names()[:3] == ["a", "b", "c"]
    assert names(matches="BIG") == ["Big/Model", "big/other"]
    assert names(matches="o") == ["Big/Model", "big/other"]
    assert names(matches="model") == ["Big/Model"]
    found = setup.http.get("/v1/models", params={"matches": "a", "limit": "1"}).json()
    assert found["models"][0] == {
        "model": "a", "bytes": 1000, "nodes": 2, "ready_on": 2, "moving_on": 0, "pinned": False, "last_use_s": T0,
    }  # fmt: skip


def test_loads_say_how_far_they_are_and_when_the_use_is_expected(setup: Setup) -> None:
    order = Order(
        DecisionId("x"), NodeName("one"), WeightsKey(ModelName("g"), ModelVersion("v")), Tier.HOST, Cause.FORECAST, Arm.TREATED,
        T0, T0 + 40.0, T0 + 60.0, 600.0,
    )  # fmt: skip
    plan = Plan(NodeName("one"), 1, 1, T0, 0.0, (DesiredWeights(order.key, 1.0, 1.0, order=order),))
    setup.state.write({records.node_key(NodeName("one"), "plan"): records.encode(plan)})
    moving = held("g", "moving", decision_id="x", cause="forecast", contributions=(("hazard", 0.8),))
    setup.virtual.advance(1.5)
    setup.report(report_of("one", [moving, held("e", "moving", cause="demand")]))
    first, second = setup.http.get("/v1/moves").json()["moves"]
    assert (first["model"], first["expected_use_s"]) == ("e", None), "what somebody waits for comes first"
    assert (second["model"], second["bytes_done"], second["ready_in_s"], second["expected_use_s"]) == ("g", 400, 0.6, T0 + 40.0)


@given(
    st.sampled_from(["ready", "moving", "pausing", "paused", "cancelling", "evicting", "part"]),
    st.booleans(),
    st.integers(0, 2),
    st.booleans(),
)
def test_every_copy_has_one_state(stage: str, is_pinned: bool, leases: int, is_ordered: bool) -> None:
    copy = held("m", stage, pinned=is_pinned, leases=leases, decision_id="x" if is_ordered else "")
    assert state_of(copy) in STATES


# --- nodes that are away, and what is wrong ---


def test_a_silent_node_is_told_with_how_long(setup: Setup) -> None:
    setup.virtual.advance(100.0)
    setup.report(report_of("one"))
    found = setup.http.get("/v1/nodes").json()
    assert [(away["node"], away["silent_s"], away["at_most_s"]) for away in found["away"]] == [("three", 70.0, 100.0), ("two", 70.0, 100.0)]
    overview = setup.http.get("/v1/overview").json()
    assert (overview["nodes"]["reporting"], overview["nodes"]["away_in_all"]) == (1, 2)


def test_nothing_is_wrong_where_nothing_is() -> None:
    with Setup() as setup:
        setup.report()
        setup.forecast(m0=(0.1, 0.2, 0.3))
        assert setup.http.get("/v1/findings").json() == {"now_s": T0, "in_all": 0, "findings": []}


def test_each_finding_has_its_next_step() -> None:
    with Setup() as setup:
        orders = [
            OrderRecord(
                f"w{i}", NODE, "waster's", "v", "host", "forecast", "treated", T0, T0, T0 + 1, None, T0 + 3600, "useless", "hold", GB
            )
            for i in range(4)
        ]
        orders += [OrderRecord("f", NODE, "org/broken", "v", "host", "forecast", "treated", T0, outcome="failed", reason="bad")]
        orders += [
            OrderRecord(f"g{i}", NODE, "good", "v", "host", "forecast", "treated", T0, T0, T0, T0, None, "timely", "", GB) for i in range(9)
        ]
        setup.state.append(records.node_key(NODE, "orders"), [records.encode(order) for order in orders], 100)
        state = records.PredictorState("hazard", "stale", 2, None, None, 500)
        setup.state.write({records.node_key(NODE, "decides"): records.encode(records.Decides("lhd", T0, {}, 0.0, 9, (state,)))})
        sources = (records.HintSource("banner", 1, 99, 0.02), records.HintSource("chat", 9, 1, 0.9), records.HintSource("new", 0, 3, 0.4))
        setup.state.write({records.FORECASTS: records.encode(records.Forecasts(T0, T0 + 1e6, {}, sources=sources))})
        setup.virtual.advance(4000.0)
        pinned = held("idle", pinned=True, last_use_s=T0)
        setup.report(report_of(held=[pinned], problems=("its disk is full",), unknown_rows=7, unknown=(("ghost", 7),)))
        found = {one["kind"]: one for one in setup.http.get("/v1/findings").json()["findings"]}
    assert found["wasteful"]["command"] == "prefetcher explain 'waster'\"'\"'s'"
    assert found["wasteful"]["what"] == "waster's: 4 of its last 4 prefetches went unused"
    assert found["wasteful"]["detail"] == "4 GB·h were held for nothing"
    assert (found["failed load"]["model"], found["failed load"]["detail"]) == ("org/broken", "its bytes are not those of its manifest")
    assert found["fallback"]["command"] == "prefetcher predictors"
    assert found["hints"]["what"] == "banner: 1 of 100 hints were kept"
    assert found["idle pin"]["command"] == "prefetcher unpin idle"
    assert found["unknown model"]["model"] == "ghost"
    assert found["node"]["severity"] == "bad"
    assert set(found) == {"wasteful", "failed load", "fallback", "hints", "idle pin", "unknown model", "node"}


def test_a_controller_that_forecasts_no_more_and_a_job_that_failed(setup: Setup) -> None:
    from prefetcher.batch.runs import JobAbout, JobRecord, JobRun

    run = JobRun("r", "recalibrate", 1, T0, "here", result="failed", ended_s=T0, error="too few outcomes")
    setup.state.write(
        {
            records.JOBS: records.encode([JobAbout("recalibrate", "how forecasts came true", 3600.0)]),
            records.job_key("recalibrate", "record"): records.encode(JobRecord(runs=(run,))),
        }
    )
    found = {one["kind"]: one for one in setup.http.get("/v1/findings").json()["findings"]}
    assert found["lag"]["command"] == "prefetcher controller"
    assert (found["job"]["command"], found["job"]["detail"]) == ("prefetcher jobs run recalibrate", "too few outcomes")


# --- one model ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path_factory.mktemp("state"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def past(server: EmbeddedServer, tmp_path: Path) -> Iterator[Past]:
    """Two partitions with a model's rows in three minutes of the last hour, and a table of forecasts before each."""
    client = connect(server.url)
    client.flushall()
    client.sadd("prefetcher:{installation}:partitions", 0, 1)
    last = int(T0 // 60)
    for partition, minute, rows in ((0, last - 30, 2), (1, last - 30, 1), (0, last - 1, 4), (0, last - 200, 9)):
        client.zadd(key(partition, "minutes"), {str(minute): minute})
        client.hset(key(partition, f"minute/{minute}"), mapping={"m0": rows, "other": 50})
    folder = tmp_path / "forecasts"
    folder.mkdir()
    for at_s, p in ((T0 - 1800, 0.5), (T0 - 600, 0.9)):
        table = pa.table({"model": ["m0", "other"], "p_120s": pa.array([p, 0.1], pa.float32())})
        pq.write_table(table, folder / f"at={at_s:.0f}.parquet")
    yield Past(TablesReader(client), None, folder, lambda: None)
    client.close()


def test_a_models_requests_and_what_was_forecast_of_them(past: Past) -> None:
    rows, whole_from_s = past.rows("m0", T0 - 3600, T0)
    assert dict(rows) == {int(T0 // 60) - 30: 3, int(T0 // 60) - 1: 4}
    assert whole_from_s == T0 - 3600
    assert past.rows("m0", T0 - 86_400, T0)[1] == 60.0 * (int(T0 // 60) - 200), "no older hours are here"
    bands = past.forecasts("m0", T0 - 3600, T0, 120.0)
    assert bands is not None
    assert [band.at_s for band in bands] == [T0 - 1800, T0 - 600]
    assert bands[0].mean == pytest.approx(math.log(2.0), rel=1e-6)
    assert past.forecasts("nobody", T0 - 3600, T0, 120.0) == []


def test_closed_hours_are_read_where_they_are(past: Past, tmp_path: Path) -> None:
    from prefetcher.ingest.history import compact_day, hour_path, write_hour

    hour = int(T0 // 3600) - 9
    path = write_hour(tmp_path / "history", 0, hour, {hour * 60 + 5: {"m0": 6, "other": 1}, hour * 60 + 7: {"other": 3}})
    past._history = tmp_path / "history"
    assert past.rows("m0", T0 - 86_400, T0)[0][hour * 60 + 5] == 6
    assert path == hour_path(tmp_path / "history", 0, hour)
    compact_day(path.parent)
    # Partitions were increased meanwhile, and the model moved.
    moved = write_hour(tmp_path / "history", 3, hour, {hour * 60 + 5: {"m0": 2}})
    rows, whole_from_s = past.rows("m0", T0 - 86_400, T0)
    assert (rows[hour * 60 + 5], whole_from_s) == (8, T0 - 86_400)
    moved.write_bytes(b"no parquet")
    rows, whole_from_s = past.rows("m0", T0 - 86_400, T0)
    assert (rows[hour * 60 + 5], whole_from_s) == (0, 60.0 * (int(T0 // 60) - 200)), "what can't be read is not said to be nothing"


def test_the_story_of_one_model(past: Past) -> None:
    with Setup() as setup:
        setup.service.past = past
        setup.report()
        setup.forecast(m0=(0.1, 0.4, 0.8))
        orders = [
            OrderRecord(
                f"d{i}",
                NODE,
                model,
                "v",
                "host",
                "hint",
                "treated",
                T0 - 60 + i,
                outcome="useless",
                reason="hold",
                contributions=(("hint", 1.0),),
            )
            for i, model in enumerate(["m0", "other", "m0"])
        ]
        setup.state.append(records.node_key(NODE, "orders"), [records.encode(order) for order in orders], 100)
        found = setup.http.get("/v1/explain/m0", params={"span_s": "3600"}).json()
        assert setup.http.get("/v1/explain/m0", params={"span_s": "7"}).status_code == 400
        assert setup.http.get("/v1/explain/nobody").status_code == 404
        # A name of another one within it is not it.
        assert [order["decision_id"] for order in setup.http.get("/v1/explain/org/m1").json()["orders"]] == []
    assert sum(found["requests"]["counts"]) == 7
    assert len(found["requests"]["counts"]) == 31
    assert [band["mean"] for band in found["forecast"]["behind"]] == pytest.approx([math.log(2.0), math.log(10.0)], rel=1e-5)
    assert found["chances"]["probabilities"] == [0.1, 0.4, 0.8]
    # The chances ahead are put back together from their parts.
    assert 1.0 - math.exp(-sum(band["mean"] for band in found["forecast"]["ahead"])) == pytest.approx(0.8, rel=1e-6)
    assert [order["decision_id"] for order in found["orders"]] == ["d2", "d0"]
    assert found["orders"][0]["why"] == "nobody used it in its time"
    assert [line["state"] for line in found["where"]] == ["ready"]


def test_a_season_has_a_band_of_bursts() -> None:
    from prefetcher_models.seasonal_artifact import NamedSeasons
    from prefetcher_models.seasonal_calendar import SLOTS
    from prefetcher_models.seasonal_profile import Season

    week = np.full(SLOTS, 6.0, np.float32)
    season = Season(week, week, 0.5, 1.0, True, 1.0, 2.0, 86_400.0, 0.0, 1e12, 500.0, 604_800.0, 3600.0, 1.0)
    named = NamedSeasons({"m0": season}, "UTC", "", T0)
    past = Past(None, None, None, lambda: named)  # type: ignore[arg-type]
    found = past.season("m0", [T0, T0 + 3600], 3600.0)
    assert found is not None
    bands, text = found
    assert [band.mean for band in bands] == pytest.approx([6.0, 6.0])
    low, high = count_band(3.0)
    assert (bands[0].low, bands[0].high) == (low / 0.5, high / 0.5)
    assert text
    assert past.season("other", [T0], 3600.0) is None


@given(st.floats(0.0, 2000.0))
def test_a_band_holds_eight_of_ten_counts(mean: float) -> None:
    low, high = count_band(mean)
    assert 0.0 <= low <= high
    counts = np.random.default_rng(0).poisson(mean, 4000)
    inside = np.mean((counts >= np.floor(low)) & (counts <= np.ceil(high)))
    assert inside >= 0.78


@given(st.floats(0.0, 1.0))
def test_the_band_of_a_chance_says_that_chance_again(p: float) -> None:
    assert 1.0 - math.exp(-band_of(T0, 60.0, p).mean) == pytest.approx(min(p, 0.9999), abs=1e-9)


# --- glance, memo, events ---


def test_the_glance_and_its_marks(setup: Setup) -> None:
    before = setup.http.get("/v1/overview").json()
    assert (before["moving"], before["waited_for"], before["models"]) == (1, 1, {"known": 9, "ready": 4})
    assert (before["may_act"], before["mode"], before["nodes"]["observing"]) == (True, "on", 1)
    setup.virtual.advance(1.5)
    setup.report(report_of("one", [held("a", last_use_s=T0)]), report_of("two"), report_of("three"))
    after = setup.http.get("/v1/overview").json()
    assert after["marks"]["moves"] != before["marks"]["moves"]
    assert after["marks"]["jobs"] == before["marks"]["jobs"]


def test_what_was_made_is_kept_for_its_time_and_errors_are_not() -> None:
    clock = VirtualClock(0.0)
    memo, made = Memo(clock), []

    def make() -> int:
        made.append(1)
        if len(made) == 2:
            raise UnavailableError("away")
        return len(made)

    assert [memo.get("x", 1.0, make) for _ in range(3)] == [1, 1, 1]
    clock.advance(1.0)
    with pytest.raises(UnavailableError):
        memo.get("x", 1.0, make)
    assert memo.get("x", 1.0, make) == 3


def heard(chunks: list[bytes]) -> list[tuple[str, dict[str, object]]]:
    found = []
    for chunk in b"".join(chunks).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in chunk.split("\n") if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_events_tell_what_changed_and_end_when_the_server_does() -> None:
    told: list[dict[str, int] | None] = [{"n": 1}, {"n": 1}, None, {"n": 2}]
    events: Events

    def make() -> dict[str, int]:
        if not told:
            events.close()
            return {"n": 2}
        now = told.pop(0)
        if now is None:
            raise UnavailableError("the store is away")
        return now

    events = Events(make)

    async def listen() -> list[bytes]:
        return [chunk async for chunk in events.stream({"may_act": False})]

    found = heard(asyncio.run(listen()))
    assert found == [
        ("overview", {"n": 1, "may_act": False}),
        ("away", {"why": "the store is away", "may_act": False}),
        ("overview", {"n": 2, "may_act": False}),
        ("end", {}),
    ]
    assert events.open == 0


def test_too_many_streams_are_refused() -> None:
    events = Events(lambda: {}, most=1)

    async def two() -> None:
        first = events.stream({})
        with pytest.raises(UnavailableError, match="open already"):
            events.stream({})
        await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(two())


def test_a_stream_over_http_carries_who_may_act(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps([{"key": "k" * 16, "name": "gateway", "roles": ["ingest"]}]))
    clock = VirtualClock(T0)
    access = Access.of(ApiSettings(keys_file=tmp_path / "keys.json"), clock)
    with Setup(clock=clock, access=access) as setup:
        setup.report()
        assert setup.http.get("/v1/events").status_code == 401
        events = setup.http.app.state.events  # type: ignore[attr-defined]
        threading.Timer(0.2, events.close).start()
        answer = setup.http.get("/v1/events", headers={"X-Api-Key": "k" * 16})
        assert answer.headers["content-type"].startswith("text/event-stream")
        (name, told), *_ = heard([answer.content])
        assert (name, told["caller"], told["may_act"]) == ("overview", "gateway", False)


# --- files ---


def test_the_page_is_served_to_everybody_and_may_load_its_own_files_only(setup: Setup) -> None:
    page = setup.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == PAGE_HEADERS["Content-Security-Policy"]
    assert "'unsafe" not in PAGE_HEADERS["Content-Security-Policy"]
    again = setup.http.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "set-cookie" not in page.headers
    for name in assets()[1:]:
        answer = setup.http.get(f"/dashboard/{name}")
        assert answer.status_code == 200
        assert answer.content == asset(name).plain
        assert gzip.decompress(asset(name).gzipped) == asset(name).plain
    for name in ("page.html", "hint.js", "routes.py", "..%2Froutes.py", "nothing"):
        assert setup.http.get(f"/dashboard/{name}").status_code == 404, name


def test_the_pages_files_name_no_other_place_and_no_inline_code() -> None:
    for name in assets():
        text = asset(name).plain.decode()
        assert "//cdn" not in text
        addresses = [word for word in text.replace('"', " ").replace("'", " ").split() if word.startswith(("http://", "https://"))]
        assert [address for address in addresses if "www.w3.org" not in address] == []
        assert "innerHTML" not in text
    page = asset("page.html").plain.decode()
    assert "onclick" not in page
    assert " style=" not in page
    assert page.count("<script") == 1
