"""Batch schedules and jobs on a running node: staged before, there while it lasts, released after, whatever dies meanwhile."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_batch_forecasting import learned
from test_live_up import Running, cli, make, models
from waiting import eventually

import prefetcher
from prefetcher.api.client import get
from prefetcher.clock import SystemClock
from prefetcher_connectors.artifact_store import ArtifactStore
from prefetcher_connectors.memory import MemoryState
from prefetcher_models.artifacts import HAZARD, about_hazard, hazard_parts
from prefetcher_models.hazard import Hazard

__all__ = ["make", "models"]

LEAD_S = 10.0


def add(up: Running, name: str, model: str, in_s: float, for_: str, *more: str) -> float:
    """A schedule that opens in that many seconds, of which whole ones count; when it opens."""
    at = datetime.fromtimestamp(SystemClock().now_s() + in_s, UTC)
    arguments = ["--models", model, "--at", f"{at:%H:%M:%S}", "--for", for_, "--lead", f"{LEAD_S:g}s", *more]
    done = cli("schedule", "add", name, *arguments, "--url", up.url)
    assert done.returncode == 0, done.stderr
    # On a machine that is slow it may be open by now.
    assert done.stdout.startswith(f"{name}: open")
    start_s: float = next(s for s in get(up.url, "/v1/schedules") if s["name"] == name)["next_start_s"]
    return start_s


@pytest.mark.parametrize("used", [False, True])
def test_weights_are_staged_before_the_window_and_released_after(make: Callable[..., Running], used: bool) -> None:
    up = make()
    start_s = add(up, "nightly", "m2", LEAD_S + 3.0, "8s")
    held = eventually(lambda: (found := up.held("m2")) is not None and found["state"] == "ready" and found)
    assert (held["cause"], held["since_s"] < start_s) == ("batch", True)
    eventually(lambda: get(up.url, "/v1/schedules")[0]["staged"] == ["m2"])
    eventually(lambda: get(up.url, "/v1/schedules")[0]["open"])
    if used:
        with prefetcher.open("m2", socket_path=up.socket_path) as opened:
            assert opened.source == "host"
    assert up.held("m2") is not None
    eventually(lambda: up.held("m2") is None)
    assert SystemClock().now_s() >= start_s + 8.0
    order = eventually(lambda: next((o for o in get(up.url, "/v1/orders?model=m2") if o.get("outcome")), None))
    assert (order["cause"], order["outcome"]) == ("batch", "timely" if used else "useless")
    if not used:
        assert order["reason"] == "window"
    listed = cli("schedule", "list", "--url", up.url).stdout
    assert "nightly" in listed
    assert "opens" in listed


def test_it_outlives_kill_9_and_its_end_too(make: Callable[..., Running]) -> None:
    up = make()
    start_s = add(up, "nightly", "m2", 5.0, "20s")
    held = eventually(lambda: (found := up.held("m2")) is not None and found["state"] == "ready" and found)
    assert held["cause"] == "batch"
    up.end(signal.SIGKILL)
    up.start()
    (schedule,) = get(up.url, "/v1/schedules")
    assert schedule["name"] == "nightly"
    assert schedule["models"] == ["m2"]
    # Brought back for the rest of the window, if it went with the node.
    eventually(lambda: (found := up.held("m2")) is not None and found["state"] == "ready")
    eventually(lambda: up.held("m2") is None)
    assert SystemClock().now_s() >= start_s + 20.0


def test_one_that_is_removed_is_released_at_once(make: Callable[..., Running]) -> None:
    up = make()
    add(up, "long", "m3", 5.0, "1h")
    eventually(lambda: (found := up.held("m3")) is not None and found["state"] == "ready")
    assert cli("schedule", "remove", "long", "--url", up.url).returncode == 0
    eventually(lambda: up.held("m3") is None)
    assert get(up.url, "/v1/schedules") == []
    again = cli("schedule", "remove", "long", "--url", up.url)
    assert again.returncode == 1
    assert "no schedule is called 'long'" in again.stderr


def test_jobs_of_a_running_node(make: Callable[..., Running], tmp_path: Path) -> None:
    up = make()
    eventually(lambda: get(up.url, "/v1/jobs"))
    up.post_requests([{"model": f"m{i % 3}"} for i in range(60)])
    up.wait_until_learned()
    listed = cli("jobs", "list", "--url", up.url)
    assert listed.returncode == 0, listed.stderr
    names = [line.split()[0] for line in listed.stdout.splitlines()[1:]]
    assert {"forecast-all", "recalibrate", "hazard-retrain", "compact-history", "forget-idle-users", "remove-old-history"} <= set(names)
    # A snapshot of what was learned comes every half a second here.
    eventually(lambda: "3 models" in cli("jobs", "run", "forecast-all", "--url", up.url).stdout)
    table = get(up.url, "/v1/forecasts")
    assert set(table["models"]) == {"m0", "m1", "m2"}
    assert len(table["horizons_s"]) == 8
    for chances in table["models"].values():
        assert chances == sorted(chances)
        assert 0.0 < chances[0] <= chances[-1] <= 1.0
    for name in names:
        done = cli("jobs", "run", name, "--url", up.url)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{name} done in ")
    runs = json.loads(cli("jobs", "runs", "forecast-all", "--json", "--url", up.url).stdout)
    assert {run["result"] for run in runs} == {"done"}
    assert runs[0]["rows"] == 3
    refused = cli("jobs", "run", "nothing", "--url", up.url)
    assert refused.returncode == 1
    assert "no job is called 'nothing'" in refused.stderr
    assert up.metric("prefetcher_jobs_total") >= len(names)
    up.end()
    up.start()
    again = json.loads(cli("jobs", "runs", "forecast-all", "--json", "--url", up.url).stdout)
    assert [run["run_id"] for run in again[-len(runs) :]] == [run["run_id"] for run in runs]


def test_a_controller_that_has_nothing_starts_from_the_last_fit(make: Callable[..., Running], tmp_path: Path) -> None:
    found = learned(MemoryState(), 4.0).predictor
    assert isinstance(found, Hazard)
    assert any(found.fit.trees)
    version = ArtifactStore(tmp_path / "state" / "artifacts").publish(HAZARD, hazard_parts(found), about_hazard(found))
    up = make()
    started = eventually(lambda: next((e for e in up.events() if e["event"] == "started_from_fit"), None))
    assert (started["version"], started["rows"]) == (version, found.fit.rows)
    up.post_requests([{"model": "m0"}, {"model": "m1"}])
    up.wait_until_learned()
    # Its own first fit comes after an hour; trees speak at once, unless they are too old to.
    eventually(lambda: "2 models" in cli("jobs", "run", "forecast-all", "--url", up.url).stdout)
    assert get(up.url, "/v1/forecasts")["fallback"] != "no fit yet"
