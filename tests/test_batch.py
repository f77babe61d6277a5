"""Jobs: one run at a time whoever runs them, what was missed, lost or hangs, and every run on record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import eventually

from prefetcher.api.jobs import JobDesk
from prefetcher.batch.runs import RUNS_KEPT, JobAbout, JobRecord, JobRun, record_of
from prefetcher.batch.scheduler import Did, Job, Run, RunEnded, Scheduler, Timing
from prefetcher.clock import Clock, SystemClock, VirtualClock
from prefetcher.controller import records
from prefetcher.errors import ModelNotFoundError, UnavailableError
from prefetcher.ports import StateStore
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

T0 = 1_767_225_600.0
QUICK = Timing(look_s=0.05, lease_s=0.8, renew_s=0.1, stop_s=0.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path_factory.mktemp("state"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def state(server: EmbeddedServer) -> Iterator[RedisState]:
    made = RedisState(server.url)
    yield made
    made._redis.flushall()
    made.close()


@pytest.fixture(params=["memory", "server"])
def either(request: pytest.FixtureRequest) -> StateStore:
    return MemoryState(SystemClock()) if request.param == "memory" else request.getfixturevalue("state")


def job(run: Callable[[Run], Did] = lambda run: Did(3, "three"), **more: Any) -> Job:
    return Job(JobAbout("j", "a job", **{"every_s": 100.0, **more}), run)


def scheduler(state: StateStore, *jobs: Job, clock: Clock | None = None, holder: str = "one", timing: Timing = QUICK) -> Scheduler:
    return Scheduler(state, clock or VirtualClock(T0), Metrics(), holder, jobs, timing)


def record(state: StateStore) -> JobRecord:
    return record_of(state.read(records.job_key("j", "record")))


def results(state: StateStore) -> list[str]:
    return [run.result for run in record(state).runs]


def counted(made: Scheduler, result: str) -> float:
    return made._metrics.registry.get_sample_value("prefetcher_jobs_total", {"job": "j", "result": result}) or 0.0


class Working:
    """A scheduler at work in a thread."""

    def __init__(self, made: Scheduler) -> None:
        self.made = made
        self._stop = threading.Event()
        self._thread = threading.Thread(target=made.run, args=(self._stop,))

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self.made

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(30.0)
        assert not self._thread.is_alive()


def test_each_time_has_one_run_and_nothing_is_due_before_the_first(either: StateStore) -> None:
    clock = VirtualClock(T0)
    ran: list[float] = []

    def run(run: Run) -> Did:
        ran.append(run.now_s)
        return Did(5, "five")

    one, two = (scheduler(either, job(run), clock=clock, holder=holder) for holder in ("one", "two"))
    for made in (one, two):
        made.look_at(made._jobs["j"])
    assert ran == []
    for seconds in (50.0, 50.0, 99.0, 1.0):
        clock.advance(seconds)
        for made in (one, two):
            made.look_at(made._jobs["j"])
    assert ran == [T0 + 100.0, T0 + 200.0]
    last = record(either).runs[-1]
    assert (last.result, last.rows, last.did, last.where, last.by_hand, last.due_s) == ("done", 5, "five", "one", False, T0 + 200.0)
    assert record(either).last_success_s == T0 + 200.0
    assert counted(one, "done") == 2


@pytest.mark.parametrize(("missed", "late_s", "expected"), [("once", 35.0, "done"), ("skip", 35.0, "skipped"), ("skip", 5.0, "done")])
def test_what_was_missed_is_made_up_for_once_or_skipped(missed: str, late_s: float, expected: str) -> None:
    state, clock = MemoryState(SystemClock()), VirtualClock(T0)
    made = scheduler(state, job(missed=missed), clock=clock)
    made.look_at(made._jobs["j"])
    clock.advance(400.0 + late_s)
    for _ in range(3):
        made.look_at(made._jobs["j"])
    assert results(state) == [expected]
    assert record(state).due_s == T0 + 400.0
    clock.advance(100.0 - late_s)
    made.look_at(made._jobs["j"])
    assert results(state) == [expected, "done"]


@pytest.mark.parametrize("error", [UnavailableError("the store is away"), ZeroDivisionError("division")])
def test_a_run_that_fails_says_why_and_comes_again_at_its_next_time(error: Exception) -> None:
    def fails(run: Run) -> Did:
        raise error

    state, clock = MemoryState(SystemClock()), VirtualClock(T0)
    made = scheduler(state, job(fails), clock=clock)
    made.look_at(made._jobs["j"])
    for _ in range(2):
        clock.advance(100.0)
        for _ in range(2):
            made.look_at(made._jobs["j"])
    assert results(state) == ["failed", "failed"]
    assert str(error) in record(state).runs[0].error
    assert record(state).last_success_s is None
    assert counted(made, "failed") == 2


def test_the_last_runs_are_kept() -> None:
    state, clock = MemoryState(SystemClock()), VirtualClock(T0)
    made = scheduler(state, job(), clock=clock)
    made.look_at(made._jobs["j"])
    for _ in range(RUNS_KEPT + 7):
        clock.advance(100.0)
        made.look_at(made._jobs["j"])
    kept = record(state).runs
    assert len(kept) == RUNS_KEPT
    assert kept[-1].due_s == T0 + 100.0 * (RUNS_KEPT + 7)


def test_a_clock_that_was_set_back_puts_nothing_off() -> None:
    state, clock = MemoryState(SystemClock()), VirtualClock(T0)
    made = scheduler(state, job(), clock=clock)
    made.look_at(made._jobs["j"])
    clock.advance(-5_000.0)
    made.look_at(made._jobs["j"])
    clock.advance(100.0)
    made.look_at(made._jobs["j"])
    assert results(state) == ["done"]


def test_daily_jobs_keep_their_local_time_when_clocks_change() -> None:
    about = JobAbout("j", "", at_s=2 * 3600 + 1800, tz="Europe/Berlin")
    times = []
    now_s = datetime(2026, 3, 27, 12, tzinfo=UTC).timestamp()
    for _ in range(4):
        now_s = about.next_due(now_s)
        times.append(f"{datetime.fromtimestamp(now_s, UTC):%d %H:%M}")
        assert about.last_due(now_s) == now_s
        assert about.last_due(now_s + 60.0) == now_s
    # On the 29th 02:30 is skipped: it counts as half an hour after the change.
    assert times == ["28 01:30", "29 01:30", "30 00:30", "31 00:30"]
    assert about.times == "daily at 02:30 Europe/Berlin"


def test_real_times_real_server_and_a_run_by_hand(state: RedisState) -> None:
    clock = SystemClock()
    go = threading.Event()

    def run(run: Run) -> Did:
        if not go.is_set():
            run.at(1, 4, "a quarter")
            go.wait(10.0)
        return Did(1, "went")

    desk = JobDesk(state, clock)
    with pytest.raises(UnavailableError, match="no scheduler ever ran"):
        desk.want("j", "ann")
    daily = job(run, every_s=86_400.0)
    with Working(scheduler(state, daily, clock=clock)) as one, Working(scheduler(state, daily, clock=clock, holder="two")):
        eventually(lambda: record(state).due_s)
        with pytest.raises(ModelNotFoundError, match="there are j"):
            desk.want("k", "ann")
        run_id = desk.want("j", "ann")
        eventually(lambda: desk.run("j", run_id).get("step") == "a quarter")
        shown = desk.run("j", run_id)
        assert (shown["result"], shown["share"], shown["by"], shown["by_hand"]) == ("running", 0.25, "ann", True)
        assert desk.jobs()[0]["running"]["run_id"] == run_id
        # One at a time: what is wanted meanwhile comes after it, once.
        second = desk.want("j", "bob")
        assert desk.want("j", "carl") == second
        assert desk.run("j", second)["result"] == "wanted"
        go.set()
        eventually(lambda: desk.run("j", second)["result"] == "done")
        assert [(run["by"], run["result"], run["rows"]) for run in desk.runs("j", 5)] == [("bob", "done", 1), ("ann", "done", 1)]
        assert desk.jobs()[0]["last"]["run_id"] == second
        eventually(lambda: (one._metrics.registry.get_sample_value("prefetcher_job_success_age_seconds", {"job": "j"}) or 1e9) < 60.0)


def test_apscheduler_runs_it_at_its_times(state: RedisState) -> None:
    with Working(scheduler(state, job(every_s=0.5), clock=SystemClock(), timing=Timing(look_s=30.0))):
        eventually(lambda: len(results(state)) >= 2)
    dues = [run.due_s for run in record(state).runs]
    assert len(set(dues)) == len(dues)
    assert all(due is not None and due % 0.5 == 0.0 for due in dues)


_KILLED = """
import sys, threading
from prefetcher.batch.scheduler import Did, Scheduler
sys.path.insert(0, {tests!r})
import test_batch as t
from prefetcher.clock import SystemClock
from prefetcher_connectors.redis import RedisState
def hold(run):
    run.at(1, 2, "half")
    threading.Event().wait()
state = RedisState({url!r})
t.scheduler(state, t.job(hold, every_s=1.0), clock=SystemClock(), holder="killed").run(threading.Event())
"""


def test_a_process_that_is_killed_in_a_run_is_followed_by_another(server: EmbeddedServer, state: RedisState) -> None:
    script = _KILLED.format(tests=str(Path(__file__).parent), url=server.url)
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        eventually(lambda: (found := record(state).running) is not None and found.step == "half")
        with Working(scheduler(state, job(every_s=1.0, missed="once"), clock=SystemClock(), holder="next")):
            threading.Event().wait(2 * QUICK.lease_s)
            # It is renewed while it runs.
            assert results(state) == []
            process.send_signal(signal.SIGKILL)
            eventually(lambda: "done" in results(state))
    finally:
        process.kill()
        process.wait()
    lost, made_up, *_ = record(state).runs
    assert (lost.result, lost.where, made_up.result, made_up.where) == ("lost", "killed", "done", "next")
    assert "killed ended in the middle" in lost.error
    assert made_up.due_s is not None


def test_what_kills_its_process_twice_is_given_up_until_its_next_time() -> None:
    state, clock = MemoryState(SystemClock()), VirtualClock(T0)
    made = scheduler(state, job(), clock=clock)
    made.look_at(made._jobs["j"])
    clock.advance(100.0)
    for number in (1, 2):
        # As a process that died in the middle of it would leave it.
        found = record(state)
        if found.running is not None:
            found = made._was_lost(found, found.running, clock.now_s())
        dying = msgspec.structs.replace(found, running=JobRun(f"r{number}", "j", 0, T0, "gone"))
        state.write({records.job_key("j", "record"): records.encode(dying)})
    made.look_at(made._jobs["j"])
    assert results(state) == ["lost", "lost", "skipped"]
    clock.advance(100.0)
    made.look_at(made._jobs["j"])
    assert results(state)[-1] == "done"


def test_a_run_that_lost_its_lease_is_told_and_what_it_makes_is_dropped(state: RedisState) -> None:
    told: list[BaseException] = []
    began, go = threading.Event(), threading.Event()

    def run(run: Run) -> Did:
        began.set()
        go.wait(10.0)
        try:
            run.write({records.job_key("j", "made"): b"old"})
        except RunEnded as exc:
            told.append(exc)
            raise
        return Did(1)

    def writes(run: Run) -> Did:
        run.write({records.job_key("j", "made"): b"new"})
        return Did(2)

    clock = SystemClock()
    slow = Timing(look_s=0.05, lease_s=0.3, renew_s=60.0, stop_s=5.0)
    with Working(scheduler(state, job(run, every_s=1.0), clock=clock, holder="asleep", timing=slow)):
        began.wait(10.0)
        made = scheduler(state, job(writes, every_s=1.0), clock=clock, holder="two")
        eventually(lambda: made.look_at(made._jobs["j"]) or "done" in results(state))
        go.set()
        eventually(lambda: told)
    assert state.read(records.job_key("j", "made")) == b"new"
    assert record(state).runs[0].result == "lost"
    assert record(state).runs[0].where == "asleep"
    assert next(run.where for run in record(state).runs if run.result == "done") == "two"


def test_a_run_that_hangs_is_reported_and_given_up(state: RedisState) -> None:
    never = threading.Event()
    hangs = [True]

    def run(run: Run) -> Did:
        if hangs and hangs.pop():
            run.step = "at the gate"
            never.wait(60.0)
        return Did(1)

    with Working(scheduler(state, job(run, every_s=1.0, most_s=0.6), clock=SystemClock())) as made:
        eventually(lambda: (found := record(state).running) is not None and found.overdue)
        assert made._metrics.registry.get_sample_value("prefetcher_job_overdue", {"job": "j"}) == 1.0
        eventually(lambda: "done" in results(state))
    never.set()
    hung = record(state).runs[0]
    assert hung.result == "hung"
    assert "at the gate" in hung.error
    assert counted(made, "hung") == 1


def test_a_run_that_is_stopped_is_made_up_for(state: RedisState) -> None:
    began = threading.Event()

    def run(run: Run) -> Did:
        began.set()
        run.stop.wait(10.0)
        run.check()
        return Did(1)

    clock = SystemClock()
    with Working(scheduler(state, job(run, every_s=3.0), clock=clock, holder="old")):
        assert began.wait(20.0)
    assert results(state) == ["stopped"]
    due_s = record(state).due_s
    made = scheduler(state, job(every_s=3.0), clock=clock, holder="new")
    made.look_at(made._jobs["j"])
    assert results(state) == ["stopped", "done"]
    assert due_s is not None
    assert (record(state).due_s or 0.0) > due_s


def test_a_store_that_forgot_the_count_of_runs_but_not_the_fence(either: StateStore) -> None:
    clock = VirtualClock(T0)
    made = scheduler(either, job(), clock=clock)
    made.look_at(made._jobs["j"])
    clock.advance(100.0)
    made.look_at(made._jobs["j"])
    either.delete([records.job_key("j", "number")])
    clock.advance(100.0)
    made.look_at(made._jobs["j"])
    assert results(either) == ["done", "done"]
    assert record(either).runs[1].number > record(either).runs[0].number
