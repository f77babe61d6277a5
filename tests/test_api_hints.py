"""`POST /v1/hints`: what is taken in, once for each key, what is answered, and what becomes of posts when something is away or full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_kit import T0, Setup, hints_of, report_of
from stream_kit import FullStreams

from prefetcher.api.hints import STORE_S
from prefetcher.clock import SystemClock
from prefetcher.controller.records import HeldWeights
from prefetcher.errors import UnavailableError
from prefetcher.ports import StreamWriter, Topic
from prefetcher.wire import HintMessage
from prefetcher_connectors.memory import MemoryState, MemoryStreams
from prefetcher_connectors.redis import EmbeddedServer, RedisState
from prefetcher_connectors.streams import FileStreams


class Gate(MemoryStreams):
    """Streams whose writer takes nothing until `opened`, and says how many appends came."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.came = threading.Semaphore(0)

    def writer(self) -> StreamWriter:
        return _GateWriter(self, super().writer())


class _GateWriter:
    def __init__(self, gate: Gate, writer: StreamWriter) -> None:
        self._gate = gate
        self._writer = writer

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        self._gate.came.release()
        assert self._gate.opened.wait(30.0)
        self._writer.append(topic, records, mark, timeout_s)

    def check(self) -> str:
        return ""

    def close(self) -> None: ...


class Flaky(MemoryState):
    """A store that is away while `away`."""

    away = False
    asked = 0

    def _look(self) -> None:
        self.asked += 1
        if self.away:
            raise UnavailableError("the state server does not answer")

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._look()
        return super().read_many(keys)

    def members(self, key: str, since_s: float) -> list[str]:
        self._look()
        return super().members(key, since_s)

    def claim(self, items: Mapping[str, bytes], expire_s: float) -> list[bytes | None]:
        self._look()
        return super().claim(items, expire_s)

    def write(self, items: Mapping[str, bytes], expire_s: float | None = None) -> None:
        self._look()
        super().write(items, expire_s)

    def delete(self, keys: Sequence[str]) -> None:
        self._look()
        super().delete(keys)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    made.report()
    with made:
        yield made


def post(setup: Setup, body: Any, key: str | None = None) -> Any:
    return setup.http.post("/v1/hints", content=json.dumps(body), headers={} if key is None else {"Idempotency-Key": key})


def test_a_hint_is_durable_when_it_is_answered(setup: Setup) -> None:
    answer = post(setup, {"model": "m0", "in_s": 5, "ttl_s": 30, "session": "s", "user": "u", "hint_id": "h", "source": "page"})
    assert answer.status_code == 202
    assert answer.json() == {"hints": [{"id": "h", "model": "m0", "state": "resident", "probability": None}]}
    assert hints_of(setup.streams) == [HintMessage("h", T0, "m0", "page", "s", "u", 5.0, 30.0)]


def test_a_list_as_plain_text(setup: Setup) -> None:
    body = json.dumps([{"model": "m0"}, {"model": "org/m1"}])
    answer = setup.http.post("/v1/hints", content=body, headers={"Content-Type": "text/plain;charset=UTF-8"})
    assert answer.status_code == 202
    assert [hint["model"] for hint in answer.json()["hints"]] == ["m0", "org/m1"]
    assert len({hint["id"] for hint in answer.json()["hints"]}) == 2
    assert [(hint.model, hint.ttl_s, hint.in_s) for hint in hints_of(setup.streams)] == [("m0", 120.0, 0.0), ("org/m1", 120.0, 0.0)]


def test_users_are_hashed_before_they_are_written(setup: Setup) -> None:
    setup.service.user_hash = lambda user: f"hash of {len(user)}"
    post(setup, {"model": "m0", "user": "somebody"})
    assert hints_of(setup.streams)[0].user == "hash of 8"


@pytest.mark.parametrize(
    ("held", "ttl_s", "state", "probability"),
    [
        ([HeldWeights("org/m1", "v", "host", "moving", 1000)], 100, "moving", 0.1),
        ([HeldWeights("org/m1", "v", "host", "evicting", 1000)], 100, "unlikely", 0.1),
        ([], 600, "likely", 0.5),
        ([], 86_400, "likely", 0.9),
    ],
)
def test_what_is_said_of_a_model(held: list[HeldWeights], ttl_s: float, state: str, probability: float) -> None:
    with Setup() as setup:
        setup.report(report_of(held=held), report_of("other", [HeldWeights("m0", "v", "host", "moving", 1000)]))
        setup.forecast(**{"org/m1": (0.1, 0.5, 0.9)})
        answer = post(setup, {"model": "org/m1", "ttl_s": ttl_s}).json()["hints"][0]
        assert (answer["state"], answer["probability"]) == (state, probability)
        setup.virtual.advance(121.0)
        setup.report(report_of(held=held))
        assert post(setup, {"model": "org/m1", "ttl_s": ttl_s}).json()["hints"][0]["probability"] is None


def test_a_model_that_no_node_knows(setup: Setup) -> None:
    refused = post(setup, [{"model": "m0"}, {"model": "nobody"}, {"model": "m0"}], key="k")
    assert (refused.status_code, refused.headers["content-type"]) == (404, "application/problem+json")
    assert [error["field"] for error in refused.json()["errors"]] == ["[1].model"]
    assert hints_of(setup.streams) == []
    setup.report(report_of(known=("m0", "nobody")))
    setup.virtual.advance(1.0)
    assert post(setup, [{"model": "m0"}, {"model": "nobody"}, {"model": "m0"}], key="k").status_code == 202


def test_while_no_node_reports_any_model_is_taken() -> None:
    with Setup(node=None) as setup:
        assert post(setup, {"model": "nobody"}).status_code == 202


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"model": ""}, 400, "model"),
        ({"model": "m0", "in_s": -1}, 400, "in_s"),
        ({"model": "m0", "in_s": True}, 400, "in_s"),
        ({"model": "m0", "ttl_s": 0}, 400, "ttl_s"),
        ({"model": "m0", "ttl_s": 86_401}, 400, "ttl_s"),
        ({"model": "m0", "surprise": 1}, 400, "surprise"),
        ([{"model": "m0"}] * 101, 413, None),
        ([], 400, None),
        (17, 400, None),
    ],
)
def test_what_is_refused(setup: Setup, body: Any, status: int, field: str | None) -> None:
    refused = post(setup, body)
    assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json")
    assert [error["field"] for error in refused.json().get("errors", [])] == ([] if field is None else [field])
    assert hints_of(setup.streams) == []
    assert setup.posts("refused") == 1


# --- once ---


@pytest.mark.parametrize(("key", "hint_id"), [("k", None), (None, "h")])
def test_the_same_again_gives_the_same_answer(setup: Setup, key: str | None, hint_id: str | None) -> None:
    body = {"model": "m0"} if hint_id is None else {"model": "m0", "hint_id": hint_id}
    first = post(setup, body, key)
    setup.report(report_of())
    setup.virtual.advance(300.0)
    assert post(setup, body, key).content == first.content
    other = Setup(setup.streams, state=setup.state, clock=setup.clock)
    with other:
        assert post(other, body, key).content == first.content
    assert len(hints_of(setup.streams)) == 1
    setup.virtual.advance(301.0)
    assert post(setup, body, key).status_code == 202
    assert len(hints_of(setup.streams)) == 2


def test_another_body_under_the_same_key(setup: Setup) -> None:
    assert post(setup, {"model": "m0"}, "k").status_code == 202
    assert post(setup, {"model": "org/m1"}, "k").status_code == 422
    assert len(hints_of(setup.streams)) == 1
    assert post(setup, {"model": "m0"}, "x" * 201).status_code == 400


def test_ids_within_a_list_and_across(setup: Setup) -> None:
    answer = post(setup, [{"model": "m0", "hint_id": "a"}, {"model": "m0", "hint_id": "a"}, {"model": "m0", "hint_id": "b"}])
    assert [hint["id"] for hint in answer.json()["hints"]] == ["a", "a", "b"]
    assert post(setup, [{"model": "m0", "hint_id": "b"}, {"model": "m0", "hint_id": "c"}]).status_code == 202
    assert [hint.hint_id for hint in hints_of(setup.streams)] == ["a", "b", "c"]


def test_many_at_one_moment_while_the_first_is_still_written() -> None:
    gate = Gate()
    with Setup(gate, clock=SystemClock()) as setup, ThreadPoolExecutor(20) as threads:
        posts = [threads.submit(post, setup, {"model": "m0"}, "k") for _ in range(20)]
        assert gate.came.acquire(timeout=20.0)
        gate.opened.set()
        answers = [future.result() for future in posts]
        assert {(answer.status_code, answer.content) for answer in answers} == {(202, answers[0].content)}
        assert len(hints_of(gate)) == 1


def test_what_came_while_others_were_written_is_written_together_and_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetcher.api.hints.ANSWER_S", 30.0)
    gate = Gate()
    with Setup(gate, clock=SystemClock()) as setup, ThreadPoolExecutor(12) as threads:
        setup.report()
        first = []
        for number in range(2):
            first.append(threads.submit(post, setup, {"model": "m0", "hint_id": f"first-{number}"}))
            assert gate.came.acquire(timeout=20.0)
        bodies = [{"model": "nobody"} if number == 4 else {"model": "m0", "hint_id": f"h{number}"} for number in range(8)]
        posts = [threads.submit(post, setup, body) for body in bodies]
        end_s = setup.clock.steady_s() + 20.0
        while len(setup.service.hints) < 10 and setup.clock.steady_s() < end_s:
            setup.clock.wait(threading.Event(), 0.01)
        gate.opened.set()
        assert {future.result().status_code for future in first} == {202}
        assert [future.result().status_code for future in posts] == [404 if number == 4 else 202 for number in range(8)]
        assert len(hints_of(gate)) == 9
        appends = 0
        while gate.came.acquire(blocking=False):
            appends += 1
        assert appends <= 2, "eight posts and two threads"


# --- away and full ---


def test_the_store_is_away() -> None:
    state = Flaky()
    state.away = True
    with Setup(state=state) as setup:
        first = post(setup, {"model": "m0", "hint_id": "h"})
        assert first.json() == {"hints": [{"id": "h", "model": "m0", "state": "unlikely", "probability": None}]}
        asked = state.asked
        assert post(setup, {"model": "m0", "hint_id": "h"}).content == first.content
        for _ in range(20):
            assert post(setup, {"model": "m0", "hint_id": "h2"}, "k2").status_code == 202
            assert post(setup, {"model": "m0"}).status_code == 202
        assert state.asked == asked, "a store that is away is left alone for a second"
        assert [hint.hint_id for hint in hints_of(setup.streams)][:2] == ["h", "h2"]
        assert len(hints_of(setup.streams)) == 22


def test_ids_are_the_same_in_every_process_while_the_store_is_away() -> None:
    written = []
    for _ in range(2):
        state = Flaky()
        state.away = True
        with Setup(state=state) as setup:
            post(setup, [{"model": "m0"}, {"model": "m1"}], "k")
            written.append([hint.hint_id for hint in hints_of(setup.streams)])
    assert written[0] == written[1]
    assert len(set(written[0])) == 2


def test_a_full_disk_forgets_the_claim() -> None:
    streams = FullStreams()
    with Setup(streams) as setup:
        refused = post(setup, {"model": "m0"}, "k")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert setup.posts("overloaded") == 1
        streams.full = False
        assert post(setup, {"model": "m0"}, "k").status_code == 202
        assert len(hints_of(streams)) == 1


def test_a_log_that_hangs_is_given_up_in_time_and_counts_once() -> None:
    gate = Gate()
    with Setup(gate, clock=SystemClock()) as setup:
        late = post(setup, {"model": "m0"}, "k")
        assert late.status_code == 503
        assert "retry-after" in late.headers
        gate.opened.set()
        assert post(setup, {"model": "m0"}, "k").status_code == 202
        assert len(hints_of(gate)) == 1


def test_more_than_may_wait_are_refused_at_once() -> None:
    from prefetcher.config import ApiSettings

    gate = Gate()
    with Setup(gate, settings=ApiSettings(hints_in_flight=2)) as setup, ThreadPoolExecutor(2) as threads:
        waiting = []
        for _ in range(2):
            waiting.append(threads.submit(post, setup, {"model": "m0"}))
            assert gate.came.acquire(timeout=20.0)
        refused = post(setup, {"model": "m0"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.opened.set()
        assert {future.result().status_code for future in waiting} <= {202, 503}
        assert len(hints_of(gate)) == 2


def test_a_session_and_its_rate() -> None:
    from prefetcher.config import ApiSettings

    with Setup(settings=ApiSettings(session_rate_per_s=0.5, session_burst=3)) as setup:
        assert [post(setup, {"model": "m0", "session": "s"}).status_code for _ in range(4)] == [202, 202, 202, 429]
        assert post(setup, {"model": "m0", "session": "s"}).headers["retry-after"] == "2"
        assert post(setup, {"model": "m0", "session": "other"}).status_code == 202
        assert post(setup, {"model": "m0"}).status_code == 202
        setup.virtual.advance(2.0)
        assert [post(setup, {"model": "m0", "session": "s"}).status_code for _ in range(2)] == [202, 429]
        assert setup.posts("limited") == 3


def test_a_store_that_hangs_keeps_no_hint_from_being_taken(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    state = RedisState(server.url, STORE_S)
    try:
        with Setup(state=state, clock=SystemClock()) as setup:
            setup.report()
            assert post(setup, {"model": "m0"}, "a").json()["hints"][0]["state"] == "resident"
            assert server._process is not None
            os.kill(server._process.pid, signal.SIGSTOP)
            try:
                answers = [post(setup, {"model": "m0", "hint_id": name}, name) for name in ("b", "c", "b")]
            finally:
                os.kill(server._process.pid, signal.SIGCONT)
            assert [answer.status_code for answer in answers] == [202, 202, 202]
            assert answers[0].content == answers[2].content
            assert [hint.hint_id for hint in hints_of(setup.streams)][1:] == ["b", "c"]
    finally:
        state.close()
        server.stop()


# --- several processes ---

_PROCESS = """
import sys, threading
import uvicorn
from pathlib import Path
from prefetcher.api.endpoint import make_endpoint
from prefetcher.api.service import Service
from prefetcher.clock import SystemClock
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.redis import RedisState
from prefetcher_connectors.streams import FileStreams

streams = FileStreams(Path(sys.argv[1]))
streams.prepare()
service = Service(None, streams.writer(), RedisState(sys.argv[2]), None, SystemClock(), Metrics(), lambda reason: None, lambda: "")
server = uvicorn.Server(uvicorn.Config(make_endpoint(service, 10_000), port=0, log_config=None, lifespan="off"))
thread = threading.Thread(target=server.run)
thread.start()
while not server.started:
    thread.join(0.01)
print(server.servers[0].sockets[0].getsockname()[1], flush=True)
sys.stdin.read()
server.should_exit = True
thread.join()
service.close()
streams.close()
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[[], tuple[list[str], Callable[[], int]]]]:
    """Starts three processes over one store: their addresses, and, once they ended, how many hints are in their logs."""
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    running: list[subprocess.Popen[str]] = []
    folders = [tmp_path / f"log-{number}" for number in range(3)]

    def start() -> tuple[list[str], Callable[[], int]]:
        for folder in folders:
            command = [sys.executable, "-c", _PROCESS, str(folder), server.url]
            running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        urls = []
        for process in running:
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        return urls, count

    def end() -> None:
        for process in running:
            with process:
                process.communicate("")

    def count() -> int:
        end()
        running.clear()
        total = 0
        for folder in folders:
            streams = FileStreams(folder)
            total += len(hints_of(streams))
            streams.close()
        return total

    yield start
    end()
    server.stop()


@pytest.mark.parametrize("by_header", [True, False])
def test_fifty_at_one_moment_to_three_processes(processes: Any, by_header: bool) -> None:
    urls, count = processes()
    together = threading.Barrier(50)

    def send(number: int) -> bytes:
        body = json.dumps({"model": "m0"} if by_header else {"model": "m0", "hint_id": "h"}).encode()
        headers = {"Idempotency-Key": "k"} if by_header else {}
        request = urllib.request.Request(urls[number % 3] + "/v1/hints", data=body, headers=headers)
        together.wait()
        while True:
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as exc:
                with exc:
                    if exc.code != 503:  # that is a machine too busy to write in time: as asked, once more
                        raise

    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(send, range(50)))
    assert len(answers) == 50
    assert len(set(answers)) == 1
    assert count() == 1
