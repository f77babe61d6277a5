"""Jobs and batch schedules over HTTP and from the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_kit import T0, Setup, report_of
from typer.testing import CliRunner

from prefetcher import cli
from prefetcher.api.client import get
from prefetcher.api.keys import Access
from prefetcher.batch.runs import JobAbout
from prefetcher.batch.scheduler import Did, Job, Run, Scheduler, Timing
from prefetcher.cli_jobs import span_of
from prefetcher.clock import SystemClock
from prefetcher.controller import records
from prefetcher.controller.records import HeldWeights
from prefetcher.errors import UsageError
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

NIGHTLY = {"name": "nightly", "models": ["m0", "org/m1"], "at": "02:00", "for_s": 1800, "days": "weekdays", "tz": "Europe/Berlin"}


@pytest.fixture
def setup() -> Iterator[Setup]:
    with Setup() as made:
        made.report()
        yield made


def test_a_schedule_is_set_listed_and_removed(setup: Setup) -> None:
    answer = setup.http.post("/v1/schedules", json=NIGHTLY)
    assert answer.status_code == 201
    found = answer.json()
    assert {**NIGHTLY, "days": ["mon", "tue", "wed", "thu", "fri"]}.items() <= found.items()
    # T0 is Thursday 2026-01-01 at midnight in UTC: 01:00 in Berlin.
    assert (found["next_start_s"], found["next_end_s"], found["open"], found["staged"]) == (T0 + 3600.0, T0 + 5400.0, False, [])
    assert setup.woken[-1] == "schedule"
    setup.virtual.advance(3700.0)
    setup.report(report_of(held=[HeldWeights("m0", "v", "host", "ready", 1000, cause="batch")]))
    (listed,) = setup.http.get("/v1/schedules").json()
    assert (listed["open"], listed["staged"], listed["set_s"]) == (True, ["m0"], T0)
    assert setup.http.delete("/v1/schedules/nightly").json() == {"removed": "nightly"}
    assert setup.woken[-1] == "schedule"
    assert setup.http.get("/v1/schedules").json() == []
    assert setup.http.delete("/v1/schedules/nightly").status_code == 404
    # Left as an empty list, so that one that went missing is known from it.
    assert setup.state.read(records.SCHEDULES) == b"{}"


def test_one_of_the_same_name_is_replaced_only_when_asked_for(setup: Setup) -> None:
    assert setup.http.post("/v1/schedules", json=NIGHTLY).status_code == 201
    again = setup.http.post("/v1/schedules", json={**NIGHTLY, "at": "03:30:15"})
    assert (again.status_code, "already" in again.json()["detail"]) == (400, True)
    assert setup.http.post("/v1/schedules", json={**NIGHTLY, "at": "03:30:15", "replace": True}).status_code == 201
    assert [one["at"] for one in setup.http.get("/v1/schedules").json()] == ["03:30:15"]


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"name": "a b"}, "name", "pattern"),
        ({"name": ""}, "name", "pattern"),
        ({"models": []}, "models", "at least 1"),
        ({"models": ["m0", "m0"]}, "models", "twice"),
        ({"models": ["m0", "m9"]}, "models.1", "no node that reports can load it"),
        ({"at": "2 am"}, "at", "local time"),
        ({"at": "24:00"}, "at", "local time"),
        ({"at": 7200}, "at", "local time"),
        ({"for_s": 0}, "for_s", "greater than 0"),
        ({"for_s": 90_000}, "for_s", "less than or equal"),
        ({"for_s": True}, "for_s", "number"),
        ({"days": "funday"}, "days", "is no day"),
        ({"days": []}, "days", "daily, weekdays"),
        ({"tz": "Mars/Olympus"}, "tz", "no time zone"),
        ({"tz": "../etc/passwd"}, "tz", "no time zone"),
        ({"lead_s": -1}, "lead_s", "greater than or equal"),
        ({"quota_bytes": 0}, "quota_bytes", "greater than 0"),
        ({"quota_bytes": 999}, "models.0", "more than the quota"),
        ({"node": "node-7"}, "node", "node-0"),
        ({"untill": 3}, "untill", "Extra"),
    ],
)
def test_fields_that_are_wrong_are_named(setup: Setup, change: dict[str, Any], field: str, reason: str) -> None:
    answer = setup.http.post("/v1/schedules", json=NIGHTLY | change)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert any(error["field"] == field and reason in error["reason"] for error in answer.json()["errors"]), answer.json()
    assert setup.http.get("/v1/schedules").json() == []


@pytest.mark.parametrize("days", ["mon,wed", "Monday, Wednesday", ["wed", "mon"], "weekends,mon"])
def test_days_in_words(setup: Setup, days: Any) -> None:
    found = setup.http.post("/v1/schedules", json=NIGHTLY | {"days": days}).json()["days"]
    assert found == (["mon", "sat", "sun"] if "weekends" in days else ["mon", "wed"])


def test_without_a_node_that_reports_names_are_taken_as_they_are() -> None:
    with Setup() as made:
        assert made.http.post("/v1/schedules", json=NIGHTLY | {"models": ["later"]}).status_code == 201


def test_only_operators_change_anything(tmp_path: Path) -> None:
    from prefetcher.api.keys import read_keys

    path = tmp_path / "keys.json"
    keys = [{"key": f"{role}-key-of-16-chars", "name": role, "roles": [role]} for role in ("hint", "ingest", "operator")]
    path.write_text(json.dumps(keys))
    with Setup(access=Access(SystemClock(), read_keys(path))) as made:
        made.report()
        for role, read, act in (("hint", 403, 403), ("ingest", 200, 403), ("operator", 200, 201)):
            headers = {"X-Api-Key": f"{role}-key-of-16-chars"}
            assert made.http.get("/v1/schedules", headers=headers).status_code == read
            assert made.http.get("/v1/jobs", headers=headers).status_code == read
            assert made.http.post("/v1/schedules", json=NIGHTLY, headers=headers).status_code == act
            assert made.http.post("/v1/jobs/x:run", headers=headers).status_code == (403 if act == 403 else 503)
        assert made.http.get("/v1/schedules", headers={"X-Api-Key": "operator-key-of-16-chars"}).json()[0]["by"] == "operator"


class Jobs:
    """An endpoint and a scheduler over one state, with a job that takes as long as the test wants."""

    def __init__(self, fails: bool = False) -> None:
        self.state = MemoryState(SystemClock())
        self.setup = Setup(state=self.state, clock=SystemClock())
        self.go = threading.Event()
        self.fails = fails
        job = Job(JobAbout("work", "works", 86_400.0, most_s=60.0), self._work)
        self._scheduler = Scheduler(self.state, SystemClock(), Metrics(), "here", [job], Timing(0.05, 2.0, 0.1, 1.0))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scheduler.run, args=(self._stop,))

    def _work(self, run: Run) -> Did:
        run.at(1, 2, "half of it")
        self.go.wait(20.0)
        if self.fails:
            raise UsageError("there is nothing to work with")
        return Did(7, "seven rows")

    def __enter__(self) -> Jobs:
        self._thread.start()
        never = threading.Event()
        while not self.setup.http.get("/v1/jobs").json():
            never.wait(0.02)
        return self

    def __exit__(self, *exc: object) -> None:
        self.go.set()
        self._stop.set()
        self._thread.join(20.0)


def test_a_job_is_run_by_hand_and_followed() -> None:
    with Jobs() as jobs:
        http = jobs.setup.http
        (found,) = http.get("/v1/jobs").json()
        assert (found["name"], found["times"], found["missed"], found["running"], found["last"]) == (
            "work",
            "every 1440 min",
            "once",
            None,
            None,
        )
        assert found["next_s"] > SystemClock().now_s()
        answer = http.post("/v1/jobs/work:run")
        assert (answer.status_code, answer.headers["location"]) == (202, answer.json()["follow"])
        follow, seen = answer.json()["follow"], set()
        never = threading.Event()
        while (run := http.get(follow).json())["result"] != "done":
            seen.add((run["result"], run.get("share"), run.get("step")))
            if run.get("step"):
                jobs.go.set()
            never.wait(0.02)
        assert ("running", 0.5, "half of it") in seen
        assert (run["rows"], run["did"], run["by_hand"], run["took_s"] > 0.0) == (7, "seven rows", True, True)
        assert [one["run_id"] for one in http.get("/v1/jobs/work/runs").json()] == [run["run_id"]]
        assert http.post("/v1/jobs/wrok:run").json()["detail"] == "no job is called 'wrok'; there are work"
        assert http.get("/v1/jobs/work/runs/none").status_code == 404
        assert http.get("/v1/jobs/none/runs").status_code == 404


def test_without_a_scheduler_nothing_is_promised(setup: Setup) -> None:
    answer = setup.http.post("/v1/jobs/work:run")
    assert (answer.status_code, "prefetcher scheduler" in answer.json()["detail"]) == (503, True)
    setup.state.write({records.JOBS: records.encode([JobAbout("work", "works", 60.0)])})
    answer = setup.http.post("/v1/jobs/work:run")
    assert (answer.status_code, "start `prefetcher scheduler`" in answer.json()["detail"]) == (503, True)


@pytest.mark.parametrize("fails", [False, True])
def test_the_command_waits_shows_how_far_it_is_and_says_what_came_of_it(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    with Jobs(fails) as jobs:

        def ask(url: str, path: str, method: str, body: Any = None) -> Any:
            answer = jobs.setup.http.request(method, path, json=body)
            if answer.status_code == 200 and answer.json() and "step" in answer.json() and answer.json()["step"]:
                jobs.go.set()
            return answer.json()

        monkeypatch.setattr("prefetcher.api.client._ask", ask)
        done = CliRunner().invoke(cli.app, ["jobs", "run", "work"])
        assert "running: 50 % half of it" in done.stderr
        if fails:
            assert "work failed: there is nothing to work with" in str(done.exception)
        else:
            assert done.exit_code == 0
            assert "\nwork done in " in done.stdout
            assert done.stdout.endswith(": seven rows\n")
        listed = CliRunner().invoke(cli.app, ["jobs", "list"]).stdout
        assert "every 1440 min" in listed
        assert ("failed: there is nothing" if fails else "done: seven rows") in listed
        runs = json.loads(CliRunner().invoke(cli.app, ["jobs", "runs", "work", "--json"]).stdout)
        assert [run["result"] for run in runs] == ["failed" if fails else "done"]
        assert "by hand" in CliRunner().invoke(cli.app, ["jobs", "runs", "work"]).stdout
        assert get("http://x", "/v1/jobs")[0]["name"] == "work"


def test_schedules_from_the_command_line(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(url: str, path: str, method: str, body: Any = None) -> Any:
        answer = setup.http.request(method, path, json=body)
        assert answer.status_code < 400, answer.text
        return answer.json() if answer.content else None

    monkeypatch.setattr("prefetcher.api.client._ask", ask)
    run = CliRunner()
    arguments = ["--models", "m0, org/m1", "--at", "02:00", "--for", "30m", "--on", "weekdays", "--tz", "Europe/Berlin"]
    added = run.invoke(cli.app, ["schedule", "add", "nightly", *arguments, "--lead", "90s", "--quota-gb", "1.5"])
    assert "\nnightly: opens " in added.stdout
    (found,) = json.loads(run.invoke(cli.app, ["schedule", "list", "--json"]).stdout)
    assert (found["for_s"], found["lead_s"], found["quota_bytes"], found["models"]) == (1800.0, 90.0, 1_500_000_000, ["m0", "org/m1"])
    listed = run.invoke(cli.app, ["schedule", "list"]).stdout
    assert "02:00 Europe/Berlin" in listed
    assert "weekdays" in listed
    assert "removed" in run.invoke(cli.app, ["schedule", "remove", "nightly"]).stdout
    assert run.invoke(cli.app, ["schedule", "list"]).stdout == "there are no schedules\n"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("30m", 1800.0), ("1.5 h", 5400.0), ("2min", 120.0)])
def test_spans(text: str, seconds: float) -> None:
    assert span_of(text, "for") == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "1d", "30 x", "1e3"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        span_of(text, "for")
