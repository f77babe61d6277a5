"""The demo's parts: real models, reproducible traffic, what a side adds up, and a page that needs no network."""

from __future__ import annotations

import re
import threading
from collections.abc import Container
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import xxhash
from rich.console import Console
from safetensors import safe_open

from prefetcher.cli import app
from prefetcher.clock import SystemClock, VirtualClock
from prefetcher.demo import demo
from prefetcher.demo.models import MODELS, make_models
from prefetcher.demo.node import DemoNode, Reading
from prefetcher.demo.page import write_page
from prefetcher.demo.request_log import LOG_DAYS
from prefetcher.demo.side import Served, Side, read_cold_s, run_side
from prefetcher.demo.traffic import DAY_S, Arrival, make_traffic
from prefetcher.demo.verdict import verdict
from prefetcher.errors import IntegrityError, NoRoomError, UnavailableError
from prefetcher.replay.trace import read_trace
from prefetcher.telemetry.metrics import Metrics


def test_models_are_real_safetensors(tmp_path: Path) -> None:
    made = make_models(tmp_path, (("a", 1), ("b", 2)), seed=3)
    for model in made:
        assert (tmp_path / model.name / "prefetcher.manifest.json").is_file()
        with safe_open(tmp_path / model.name / "model.safetensors", "numpy") as file:
            assert len(list(file.keys())) == 8
            tensor = file.get_tensor(model.checked_tensor)
        assert xxhash.xxh3_64_intdigest(tensor) == model.digest
    again = make_models(tmp_path / "again", (("a", 1), ("b", 2)), seed=3)
    assert [m.digest for m in again] == [m.digest for m in made]


def test_the_catalog_is_what_the_demo_promises() -> None:
    sizes = [mb for _, mb in MODELS]
    assert len(sizes) == 12
    assert min(sizes) == 40
    assert max(sizes) == 400
    assert 1_400 < sum(sizes) < 1_600


def test_its_traffic_is_a_log_that_replay_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["demo", "--write-log", str(tmp_path / "log")], standalone_mode=False)
    log, catalog = map(Path, capsys.readouterr().out.split())
    trace = read_trace(log, catalog=catalog)
    assert len(trace) == len(make_traffic(LOG_DAYS))
    assert dict(zip(trace.models, trace.bytes_, strict=True)) == {name: megabytes * 10**8 for name, megabytes in MODELS}
    assert trace.t1 - trace.t0 > (LOG_DAYS - 1) * DAY_S
    assert not trace.problems.lines()


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError, match="name another --out"):
        make_models(tmp_path, (("a", 10**12),))
    assert not list(tmp_path.iterdir())


def test_traffic_has_peaks_and_followers() -> None:
    arrivals = make_traffic(2, seed=1)
    assert arrivals == make_traffic(2, seed=1) == sorted(arrivals)
    assert arrivals != make_traffic(2, seed=2)
    assert {a.model for a in arrivals} == {name for name, _ in MODELS}
    assert all(0 <= a.at_s < 2 * DAY_S for a in arrivals)
    peak = [a for a in arrivals if a.model == "chat-large" and 8 <= a.at_s % DAY_S / 3600 < 20]
    assert len(peak) > 0.8 * sum(a.model == "chat-large" for a in arrivals)
    vision = [a.at_s for a in arrivals if a.model == "vision"]
    ocr = [a.at_s for a in arrivals if a.model == "ocr"]
    assert all(any(v <= o for v in vision) for o in ocr)


def _side() -> Side:
    side = Side("with <prefetching>")
    side.served = [
        Served(10.0, "a", "absent", "host", 0.5),
        Served(20.0, "a", "moving", "host", 0.25),
        Served(30.0, "a", "ready", "host", 0.001),
    ]
    side.readings = [
        Reading(0.0, 0, 0.0, 0.0, {}),
        Reading(3600.0, 2_000_000_000, 1.8e12, 3.6e11, {"timely": 3, "useless": 1}, 1),
    ]
    return side


def test_a_side_adds_up() -> None:
    side = _side()
    assert side.cold_starts == 1
    assert side.cold_seconds == pytest.approx(0.75)
    assert side.held_gb_h == pytest.approx(1.0)
    assert side.idle_gb_h == pytest.approx(0.5)
    assert side.wasted_gb_h == pytest.approx(0.1)
    assert side.percentile_s(50) == pytest.approx(0.25)


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "demo.html", [_side(), Side("nothing served")], ["Run <again>."], ["Notes."])
    text = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "with &lt;prefetching&gt;" in text
    assert "3 timely, 1 useless" in text
    assert "Run &lt;again&gt;." in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


def _waited(seconds: float, reading_s: tuple[float, float] = (1.0, 1.0), **last: Any) -> Side:
    side = Side("side", reading_s=reading_s)
    side.served = [Served(10.0, "a", "absent", "host", seconds)]
    side.readings = [Reading(0.0, 0, 0.0, 0.0, {}), Reading(1.0, 0, 0.0, 0.0, {}, **last)]
    return side


def test_the_verdict_says_what_was_saved_and_by_what() -> None:
    said = verdict([_waited(183.0), _waited(121.0, ordered=40, bypassed=300, ahead_s=20_000.0)], 2_000.0)
    assert said[0] == "With prefetching: cold waiting 121 s instead of 183 s (\N{MINUS SIGN}34%)."
    assert said[1] == "40 prefetches were ordered; what was used of it had loaded 10.0 s ahead of its use."
    assert "300 requests were read from disk without being kept" in said[2]
    assert verdict([_waited(100.0), _waited(98.0)], 1.0)[0].startswith("No difference that counts: ")
    assert "(+50%)" in verdict([_waited(100.0), _waited(150.0)], 1.0)[0]


def test_the_verdict_says_why_nothing_was_ordered() -> None:
    reasons = {"victims_worth_more": 123, "link_busy": 7, "below_price": 50, "no_room": 1}
    (_, why, _) = verdict([_waited(2.0), _waited(1.0, not_ordered=reasons)], 1.0)
    reasons_named = "what would have to leave is worth more (123 times); holding it costs more than it saves (50 times)"
    assert why == f"No prefetch was ordered: {reasons_named}; the disk was busy (7 times)."
    (_, why, _) = verdict([_waited(2.0), _waited(1.0, ordered=1, not_ordered=reasons)], 1.0)
    assert why.startswith("1 prefetch was ordered; ")
    assert f"More were not: {reasons_named}" in why


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((1.0, 1.0), (1.2, 1.2), ""),
        ((1.0, 1.0), (1.8, 2.0), "1.9 times slower during the second side: run again when it is idle"),
        ((3.0, 3.0), (1.0, 1.0), "3.0 times slower during the first side"),
        ((1.0, 1.8), (1.8, 1.0), "up to 1.8 times slower at times"),
    ],
)
def test_a_machine_that_was_busy_on_one_side_is_said_before_any_figure(
    first: tuple[float, float], second: tuple[float, float], said: str
) -> None:
    found = verdict([_waited(142.0, first), _waited(134.0, second)], 1.0)
    assert ("slower" in found[0]) == bool(said)
    assert said in found[0]
    assert any(line.startswith("Not to be relied on: cold waiting") for line in found) == bool(said)


def test_a_cold_read_is_checked(tmp_path: Path) -> None:
    models = make_models(tmp_path, (("a", 1), ("b", 2), ("c", 3)))
    assert read_cold_s(models, SystemClock()) > 0.0
    path = models[1].folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="b: a tensor"):
        read_cold_s(models, SystemClock())


def test_what_the_node_counts_is_read_from_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    for cause, arm in (("forecast", "treated"), ("forecast", "control"), ("hint", "treated")):
        metrics.orders.labels(cause=cause, arm=arm).inc(2)
    metrics.skipped.labels(what="prefetch", reason="no_room").inc(3)
    metrics.skipped.labels(what="order", reason="does_not_fit").inc()
    metrics.outcomes.labels(outcome="timely").inc()
    node = DemoNode.__new__(DemoNode)
    monkeypatch.setattr(node, "_text", lambda path, body=None: metrics.text().decode())
    status = {"now_s": 1.0, "node": {"memory": {"taken_bytes": 5}}, "totals": {"cold_starts": 4, "bypassed": 2, "saved_seconds": 9.0}}
    monkeypatch.setattr(node, "ask", lambda path, body=None: status)
    assert node.read() == Reading(1.0, 5, 0.0, 0.0, {"timely": 1}, 4, 2, 6, {"no_room": 3}, 9.0)


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_nodes_wrote_goes_unless_it_is_kept(tmp_path: Path, keep: bool, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("history", "side-0", "side-1"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "demo.html").touch()
    demo._tidy(tmp_path, keep, Console(width=200))
    assert {path.name for path in tmp_path.iterdir()} == ({"demo.html", "history", "side-0", "side-1"} if keep else {"demo.html"})
    assert ("Kept: logs and state" in capsys.readouterr().out) == keep


class _BusyNode(DemoNode):
    """Answers no reading whose number is in `refused`; nobody asks it for weights."""

    def __init__(self, refused: Container[int]) -> None:
        self.refused, self.asked = refused, 0

    def read(self) -> Reading:
        self.asked += 1
        if self.asked in self.refused:
            raise UnavailableError("too busy")
        return Reading(1.0, 0, 0.0, 0.0, {}, self.asked)


def test_a_node_that_is_too_busy_to_be_read_is_read_again() -> None:
    # Read in vain: before the first request, at the only sample, and at the end.
    node = _BusyNode({1, 3, 4, 5})
    side = run_side("side", node, [Arrival(70.0, "nobody")], [], 100.0, VirtualClock())
    assert [reading.cold_starts for reading in side.readings] == [2, 6]
    with pytest.raises(UnavailableError):
        run_side("side", _BusyNode(range(10**6)), [], [], 100.0, VirtualClock())


def test_what_the_node_refuses_is_told_with_its_reason() -> None:
    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"detail": "the disk is full"}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        node = DemoNode.__new__(DemoNode)
        node.url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UnavailableError, match=r"refuses /v1/requests with 503: .*the disk is full"):
            node.ask("/v1/requests", [])
        server.shutdown()
        thread.join()
