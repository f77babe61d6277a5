"""The contract of state stores, on a real embedded server and on its twin in memory; and the embedded server's own life."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import HURRIED_S, EmbeddedServer, RedisState


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    named = os.environ.get("PREFETCHER_TEST_REDIS")
    if named:
        yield named
        return
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(params=["server", "memory"])
def store(request: pytest.FixtureRequest) -> Iterator[StateStore]:
    made: StateStore = RedisState(request.getfixturevalue("server_url")) if request.param == "server" else MemoryState()
    yield made
    made.delete([f"t:{{t}}:{name}" for name in ("a", "b", "fence", "n", "list")])
    made.close()


def key(name: str) -> str:
    return f"t:{{t}}:{name}"


def test_values(store: StateStore) -> None:
    assert store.read(key("a")) is None
    store.write({key("a"): b"1", key("b"): b"\x00\xff"})
    assert store.read_many([key("b"), key("list"), key("a")]) == [b"\x00\xff", None, b"1"]
    store.delete([key("a")])
    assert store.read(key("a")) is None


def test_values_expire(store: StateStore) -> None:
    store.write({key("a"): b"1"}, expire_s=0.05)
    store.write({key("b"): b"1"}, expire_s=60.0)
    threading.Event().wait(0.1)
    assert store.read_many([key("a"), key("b")]) == [None, b"1"]


def test_a_stale_fence_writes_nothing(store: StateStore) -> None:
    first, second = store.next_number(key("n")), store.next_number(key("n"))
    assert (first, second) == (1, 2)
    assert store.write_fenced(key("fence"), first, {key("a"): b"first"})
    assert store.write_fenced(key("fence"), second, {key("a"): b"second"})
    assert not store.write_fenced(key("fence"), first, {key("a"): b"stale", key("b"): b"stale"})
    assert store.read_many([key("a"), key("b")]) == [b"second", None]


def test_one_of_many_claims_a_key(store: StateStore) -> None:
    assert store.claim({key("a"): b"1", key("b"): b"1"}, 60.0) == [None, None]
    assert store.claim({key("b"): b"2", key("n"): b"2"}, 0.05) == [b"1", None]
    assert store.read_many([key("a"), key("b"), key("n")]) == [b"1", b"1", b"2"]
    threading.Event().wait(0.1)
    found: list[bytes | None] = []
    together = threading.Barrier(8)

    def claim(number: int) -> None:
        together.wait()
        found.extend(store.claim({key("n"): str(number).encode()}, 60.0))

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(None) == 1
    assert {item for item in found if item is not None} == {store.read(key("n"))}


def test_a_value_is_replaced_only_where_it_is_the_expected_one(store: StateStore) -> None:
    assert not store.replace(key("a"), b"0", b"1")
    assert store.replace(key("a"), None, b"\x00")
    assert not store.replace(key("a"), None, b"2")
    assert not store.replace(key("a"), b"1", b"2")
    assert store.replace(key("a"), b"\x00", b"")
    assert store.replace(key("a"), b"", b"3")
    assert store.read(key("a")) == b"3"


def test_lists_keep_their_tail(store: StateStore) -> None:
    assert store.tail(key("list"), 3) == []
    store.append(key("list"), [b"1", b"2", b"3"], keep=3)
    store.append(key("list"), [b"4"], keep=3)
    store.append(key("list"), [], keep=3)
    assert store.tail(key("list"), 2) == [b"3", b"4"]
    assert store.tail(key("list"), 10) == [b"2", b"3", b"4"]


def test_members_are_there_until_they_are_forgotten(store: StateStore) -> None:
    store.see(key("seen"), "one", 10.0)
    store.see(key("seen"), "two", 20.0)
    store.see(key("seen"), "one", 30.5)
    assert store.members(key("seen"), 25.0) == ["one"]
    assert store.last_seen(key("seen")) == {"one": 30.5, "two": 20.0}
    store.unsee(key("seen"), ["one", "nobody"])
    store.unsee(key("seen"), [])
    assert store.last_seen(key("seen")) == {"two": 20.0}
    store.unsee(key("seen"), ["two"])
    assert store.last_seen(key("seen")) == {}


def test_the_embedded_server_keeps_its_folder(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    store = RedisState(server.url)
    store.write({key("a"): b"kept"})
    store.close()
    server.stop()
    with pytest.raises(UnavailableError):
        RedisState(server.url)
    server.start()
    store = RedisState(server.url)
    assert store.read(key("a")) == b"kept"
    store.close()
    server.stop()


def test_a_socket_path_that_is_too_long_for_the_kernel(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("x" * 120))
    server.start()
    RedisState(server.url).close()
    server.stop()
    assert not Path(server.url.removeprefix("unix://")).exists()


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from prefetcher_connectors.redis import EmbeddedServer\n"
        "s = EmbeddedServer(Path(sys.argv[1])); s.start(); print(s._process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: _is_gone(pid))


def test_no_server_there() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        RedisState("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match="no address"):
        RedisState("nonsense")


@pytest.mark.parametrize(
    "address", ["redis://:s3cr/etI@host", "redis://:a@s3cr/b@host", "redis://127.0.0.1:1/0?unknown=s3cr", "redis://me:s3cr"]
)
def test_an_address_that_is_none_is_not_quoted(address: str) -> None:
    with pytest.raises(UnavailableError, match=r"is no address of|asks for an option") as caught:
        RedisState(address)
    assert "s3cr" not in str(caught.value)


def test_a_socket_whose_path_has_an_at(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "a@b")
    server.start()
    try:
        RedisState(server.url).close()
    finally:
        server.stop()


def _pid(server: EmbeddedServer) -> int:
    assert server._process is not None
    return server._process.pid


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "state")
    made.start()
    yield made
    made.stop()


def test_a_server_that_hangs_is_given_up_and_used_again(own: EmbeddedServer) -> None:
    store = RedisState(own.url, HURRIED_S)
    store.write({key("a"): b"1"})
    os.kill(_pid(own), signal.SIGSTOP)
    try:
        for _ in range(2):  # with the connection that it has, and with a new one
            with pytest.raises(UnavailableError, match="does not answer") as caught:
                store.read(key("a"))
            assert caught.value.retry_after_s > 0
    finally:
        os.kill(_pid(own), signal.SIGCONT)
    assert store.read(key("a")) == b"1"
    store.close()


class Kept:
    """A server that is kept, and what was told of it."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.restarted: list[str] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=server.keep, args=(self._stop, self.restarted.append, self.failed.append))
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()



def test_a_server_that_is_killed_comes_back_with_what_it_had_answered_for(own: EmbeddedServer) -> None:
    store, kept = RedisState(own.url, why_away=own.why_away), Kept(own)
    try:
        for i in range(3):
            store.write({key("a"): str(i).encode()})
            store.append(key("list"), [str(i).encode()], keep=10)
            assert store.write_fenced(key("fence"), i, {key("b"): b"fenced"})
            before = _pid(own)
            os.kill(before, signal.SIGKILL)
            eventually(lambda i=i: len(kept.restarted) == i + 1)
            assert own.why_away() == ""
            assert _pid(own) != before
            assert store.read_many([key("a"), key("b")]) == [str(i).encode(), b"fenced"]
        assert store.tail(key("list"), 10) == [b"0", b"1", b"2"]
        assert kept.restarted == ["it was ended by SIGKILL"] * 3
        assert kept.failed == []
        os.kill(_pid(own), signal.SIGTERM)
        eventually(lambda: len(kept.restarted) == 4)
        assert kept.restarted[-1].startswith("it ended with code 0: ")
    finally:
        kept.end()
        store.close()
    own.stop()
    with pytest.raises(UnavailableError):
        RedisState(own.url)


def test_a_server_that_does_not_come_back_says_why_until_it_does(own: EmbeddedServer, tmp_path: Path) -> None:
    store, kept = RedisState(own.url, why_away=own.why_away), Kept(own)
    try:
        store.write({key("a"): b"kept"})
        listed = tmp_path / "state" / "appendonlydir" / "appendonly.aof.manifest"
        good = listed.read_bytes()
        listed.write_bytes(b"nonsense\n")
        os.kill(_pid(own), signal.SIGKILL)
        eventually(lambda: kept.failed)
        with pytest.raises(UnavailableError, match=r"the embedded state server ended; it is being started again.*did not start"):
            store.read(key("a"))
        listed.write_bytes(good)
        eventually(lambda: kept.restarted)
        assert store.read(key("a")) == b"kept"
        assert (len(kept.failed), kept.restarted) == (1, ["it was ended by SIGKILL"])
    finally:
        kept.end()
        store.close()


def test_a_restarted_server_ends_with_its_process_too(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, sys, threading; from pathlib import Path; from prefetcher_connectors.redis import EmbeddedServer\n"
        "s = EmbeddedServer(Path(sys.argv[1])); s.start(); told = threading.Event()\n"
        "threading.Thread(target=s.keep, args=(threading.Event(), lambda reason: told.set(), print)).start()\n"
        "os.kill(s._process.pid, 9); told.wait(); print(s._process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "s")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
