"""The typed client and `prefetcher hint` against a real endpoint, and against servers that break off, hold and limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_kit import Silent
from up_kit import COMMAND, Up, eventually, running

from prefetcher.client import Client, Hint, HintTaken, Request
from prefetcher.errors import ModelNotFoundError, PrefetcherError, RateLimitedError, UnavailableError, UsageError

OPS = "sk_operator-0123456789"
BACKEND = "sk_backend-0123456789"
SLOW = "sk_slow-0123456789abc"
KEYS = [
    {"key": OPS, "name": "ops", "roles": ["operator"]},
    {"key": BACKEND, "name": "backend", "roles": ["hint", "ingest"]},
    {"key": SLOW, "name": "slow", "roles": ["hint"], "rate_per_s": 0.001, "burst": 1},
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running(tmp_path_factory.mktemp("up"), KEYS) as made:
        yield made


@pytest.fixture
def backend(up: Up) -> Iterator[Client]:
    with Client(up.url, key=BACKEND) as made:
        yield made


def test_hints_and_what_becomes_of_them(up: Up, backend: Client) -> None:
    before = len(up.hints())
    taken = backend.hint("m1", in_s=5, ttl_s=300, session="s-1", user="u-1", surface="chat", kind="intent")
    assert (taken.model, taken.state in ("resident", "moving", "likely", "unlikely")) == ("m1", True)
    (written,) = up.hints()[before:]
    assert (written.model, written.source, written.surface, written.kind) == ("m1", "backend", "chat", "intent")
    assert (written.in_s, written.ttl_s, written.session) == (5, 300, "s-1")
    assert written.user not in (None, "u-1"), "users are hashed"
    several = backend.hints([Hint(model="m2", hint_id="one"), Hint(surface="settings")])
    assert (several[0].id, several[0].model) == ("one", "m2")
    assert several[1].model is None
    found = eventually(lambda: [row for row in backend.residency("m2") if row.state == "ready"])
    assert (found[0].tier, found[0].ready_in_s, found[0].bytes) == ("host", 0, found[0].bytes_done)
    assert {row.model for row in backend.residency()} >= {"m2"}


def test_requests_are_learned_from_and_forecast(up: Up, backend: Client) -> None:
    assert backend.requests([Request(model="m0", user="u-1"), Request(model="m3", count=2)]) == 2
    forecast = eventually(lambda: backend.forecast("m0"))
    assert set(forecast.probabilities) == {120, 600, 3600}
    assert forecast.valid_until_s > forecast.issued_at_s


def test_refusals_are_the_programs_own_errors(up: Up, backend: Client) -> None:
    with pytest.raises(ModelNotFoundError, match="no node knows"):
        backend.hint("nonsense")
    with pytest.raises(ModelNotFoundError, match="nonsense"):
        backend.residency("nonsense")
    with pytest.raises(UsageError, match="in_s"):
        backend.hint("m0", in_s=-1)
    with Client(up.url, key="sk_wrong-0123456789") as unknown, pytest.raises(UsageError, match="PREFETCHER_KEY"):
        unknown.hint("m0")
    with Client(up.url, key=OPS) as operator, pytest.raises(PrefetcherError, match="may not do this"):
        operator.hint("m0")
    for wrong in ("nonsense", "http://user:pw@host", "ftp://host"):
        with pytest.raises(UsageError, match="write http://host:port"):
            Client(wrong)
    with pytest.raises(UsageError, match="line end"):
        Client(up.url, key="sk\nx")
    for empty in (backend.hints, backend.requests):
        with pytest.raises(UsageError, match="these are 0"):
            empty([])
    with Client(up.url, key=SLOW, timeout_s=1.0) as slow:
        slow.hint("m0")
        # It would have to wait for longer than there is time.
        with pytest.raises(RateLimitedError, match="'slow'") as limited:
            slow.hint("m0")
        assert limited.value.retry_after_s > 1.0


def test_many_threads_share_a_client(up: Up, backend: Client) -> None:
    before = len(up.hints())
    found: list[HintTaken] = []
    threads = [threading.Thread(target=lambda: found.extend(backend.hint("m0") for _ in range(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({hint.id for hint in found}) == 20
    assert len({hint.hint_id for hint in up.hints()[before:]}) == 20


class BreaksOff:
    """Passes posts on to an endpoint and drops the first answers: what was taken in is not known to who sent it."""

    def __init__(self, target: str, drops: int) -> None:
        self._target = tuple(target.removeprefix("http://").split(":"))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.drops = drops
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                held, _ = self._listener.accept()
            except OSError:
                return
            with held, socket.create_connection((self._target[0], int(self._target[1]))) as out:
                said = b""
                while b"\r\n\r\n" not in said:
                    said += held.recv(65536)
                head, _, body = said.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                while len(body) < length:
                    body += held.recv(65536)
                out.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
                answer = b"".join(iter(lambda: out.recv(65536), b""))
                if self.drops:
                    self.drops -= 1
                else:
                    held.sendall(answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.mark.parametrize("what", ["hint", "requests"])
def test_an_answer_that_is_lost_is_asked_for_again_and_counts_once(up: Up, what: str) -> None:
    between = BreaksOff(up.url, 2)
    before = len(up.hints())
    try:
        with Client(between.url, key=BACKEND, timeout_s=20.0) as client:
            if what == "hint":
                assert client.hint("m2", session="lost").model == "m2"
                assert [hint.session for hint in up.hints()[before:]] == ["lost"]
            else:
                assert client.requests([Request(model="m2")]) == 1
                segments = (up.folder / "state" / "requests").glob("*.jsonl")
                rows = [json.loads(line) for path in segments for line in path.read_text().splitlines()]
                ids = [row["request_id"] for row in rows if row["model"] == "m2"]
                assert len(ids) - len(set(ids)) == 2, "the stream has it three times, under one id"
            assert between.drops == 0
    finally:
        between.close()


def test_who_is_away_or_silent_is_given_up_in_time(up: Up) -> None:
    with Silent() as silent, Client(silent.url, key="", timeout_s=0.3) as client, pytest.raises(UnavailableError, match="nobody answers"):
        client.hint("m0")
    with Client("http://127.0.0.1:1", key="") as client, pytest.raises(UnavailableError, match="prefetcher up"):
        client.residency()


def test_a_connection_that_was_closed_meanwhile_is_opened_again(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        client = Client(first.url, key="")
        client.hint("m0")
        host, port = first.url.removeprefix("http://").split(":")
    with pytest.raises(UnavailableError):
        client.hint("m0")
    (tmp_path / "again").mkdir()
    with running(tmp_path / "again", port=int(port)):
        assert host == "127.0.0.1"
        assert client.hint("m0").model == "m0"
    client.close()


def hint(url: str, *arguments: str, key: str = BACKEND) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PREFETCHER_KEY": key}
    return subprocess.run([*COMMAND, "hint", *arguments, "--url", url], capture_output=True, text=True, timeout=60, env=environment)


def test_the_command(up: Up) -> None:
    before = len(up.hints())
    said = hint(up.url, "m1", "--in", "5s", "--ttl", "10m", "--surface", "ops", "--session", "s", "--user", "u", "--kind", "intent")
    assert (said.returncode, said.stdout.startswith("hinted m1: "), said.stderr) == (0, True, "")
    (written,) = up.hints()[before:]
    assert (written.model, written.in_s, written.ttl_s, written.surface, written.kind) == ("m1", 5, 600, "ops", "intent")
    answer = json.loads(hint(up.url, "m0", "--json").stdout)
    assert (answer["model"], set(answer) >= {"id", "state", "probability"}) == ("m0", True)
    nameless = hint(up.url, "--surface", "ops")
    assert (nameless.returncode, nameless.stdout.startswith("hinted ops: ")) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--surface"),
        (("m0", "--in", "soon"), 2, "--in"),
        (("m0", "--kind", "wish"), 2, "intent"),
        (("nonsense",), 1, "no node knows"),
    ],
)
def test_what_the_command_refuses(up: Up, arguments: tuple[str, ...], code: int, words: str) -> None:
    said = hint(up.url, *arguments)
    assert (said.returncode, said.stdout) == (code, "")
    assert said.stderr.startswith("error: ")
    assert words in said.stderr
    assert said.stderr.count("\n") == 1
