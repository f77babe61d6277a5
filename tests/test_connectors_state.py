"""The contract of state stores, on a real embedded server and on its twin in memory; and the embedded server's own life."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState


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


def test_lists_keep_their_tail(store: StateStore) -> None:
    assert store.tail(key("list"), 3) == []
    store.append(key("list"), [b"1", b"2", b"3"], keep=3)
    store.append(key("list"), [b"4"], keep=3)
    store.append(key("list"), [], keep=3)
    assert store.tail(key("list"), 2) == [b"3", b"4"]
    assert store.tail(key("list"), 10) == [b"2", b"3", b"4"]


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
    for _ in range(500):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                break
        except (ProcessLookupError, FileNotFoundError):
            break
        threading.Event().wait(0.01)
    else:
        pytest.fail("the server outlived its parent")


def test_no_server_there() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        RedisState("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match="no address"):
        RedisState("nonsense")
