"""The lease socket under strain: many shards, clients that hang, forks, long paths, folders of others, files that nobody may write."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from weights_kit import MAY_BE_ANYBODY, MB, OneModelAgent, eventually, expected, fill, make_source, serving

import prefetcher
from prefetcher.agent import protocol
from prefetcher.agent.client import ask
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.lease_server import MAX_WAITING, Grant, Holder, LeaseServer
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.errors import NoRoomError, PrefetcherError, UnavailableError, UsageError

SHARDS = 450


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(64 * MB, name=f"leases-{os.getpid()}", lock="off")
    yield arena
    arena.close()


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return make_source(tmp_path / "models", "llama", 2)


@pytest.fixture
def many(tmp_path: Path) -> ModelSource:
    """A model of more files than the kernel passes at once (253)."""
    folder = tmp_path / "many" / "llama"
    folder.mkdir(parents=True)
    for i in range(SHARDS):
        save_file({f"t{i}": np.array([i, i * 7], np.int32)}, folder / f"model-{i:05d}-of-{SHARDS:05d}.safetensors")
    write_manifests(folder)
    return scan_models_folder(folder).source("llama")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- many shards ---


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_model_of_450_shards_is_opened_whole(where: str, arena: HostArena, many: ModelSource, tmp_path: Path) -> None:
    if where == "host":
        fill(arena, many)
    with serving(OneModelAgent(arena, many), tmp_path) as path:
        before = open_files()
        with prefetcher.open("llama", socket_path=path) as tensors:
            assert tensors.source == where
            assert len(tensors) == SHARDS
            assert all(tensors[f"t{i}"].tolist() == [i, i * 7] for i in range(SHARDS))
        eventually(lambda: open_files() <= before)


FEW = """
import resource, sys, prefetcher
from prefetcher.errors import UnavailableError
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    prefetcher.open("llama", socket_path=sys.argv[1])
except UnavailableError as exc:
    print(exc)
"""


def test_a_client_that_may_open_too_few_files_is_told_so(arena: HostArena, many: ModelSource, tmp_path: Path) -> None:
    fill(arena, many)
    agent = OneModelAgent(arena, many)
    with serving(agent, tmp_path) as path:
        done = subprocess.run([sys.executable, "-c", FEW, path], capture_output=True, text=True, timeout=60)
        assert "ulimit -n" in done.stdout, done.stderr
        eventually(lambda: not agent.held)


def test_an_agent_raises_its_limit_of_open_files(many: ModelSource) -> None:
    code = """
import resource, sys
from pathlib import Path
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.loader import load
from prefetcher.agent.manifest import scan_models_folder
from prefetcher.clock import SystemClock
from prefetcher.errors import NoRoomError
source = scan_models_folder(Path(sys.argv[1])).source("llama")
for hard, works in ((4096, True), (256, False)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    arena = HostArena(64 << 20, name=sys.argv[2], lock="off")
    try:
        copy = arena.begin(source.manifest)
        load(source.manifest, source.folder, arena, copy, clock=SystemClock())
    except NoRoomError as exc:
        print(exc)
    else:
        print("loaded")
    assert arena.usage().loading_bytes == (source.manifest.bytes if works else 0)
    arena.close()
"""
    arguments = [str(many.folder), f"files-{os.getpid()}"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    loaded, refused = done.stdout.splitlines()
    assert loaded == "loaded"
    assert "ulimit -n" in refused


# --- clients that hang, cheat or fork ---


def raw_connection(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(str(path))
    return sock


def acquire_line(number: int) -> bytes:
    return json.dumps({"type": "acquire", "id": number, "model": "llama"}).encode() + b"\n"


def test_a_client_that_never_reads_is_hung_up_on_and_keeps_nobody_waiting(arena: HostArena, many: ModelSource, tmp_path: Path) -> None:
    fill(arena, many)
    agent = OneModelAgent(arena, many)
    with serving(agent, tmp_path, patience_s=0.5) as path:
        before = open_files()
        with raw_connection(path) as silent:
            # 20 kB of names each: some answers fill the socket's buffer, and the next can't be sent.
            for number in range(40):
                silent.sendall(acquire_line(number))
            eventually(lambda: agent.held)
            with prefetcher.open("llama", socket_path=path) as tensors:
                assert tensors["t3"].tolist() == [3, 21]
            eventually(lambda: not agent.held)
            assert len(agent.released) >= 40
        eventually(lambda: open_files() <= before)


def test_requests_that_wait_on_one_connection_are_bounded(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    agent = OneModelAgent(arena, model)
    agent.hang = True
    with serving(agent, tmp_path) as path, raw_connection(path) as sock:
        for number in range(MAX_WAITING + 3):
            sock.sendall(acquire_line(number))
        connection = protocol.Connection(sock)
        refused = [connection.receive() for _ in range(3)]
        assert [r.id for r in refused if isinstance(r, protocol.Failed)] == [MAX_WAITING, MAX_WAITING + 1, MAX_WAITING + 2]
        sock.sendall(acquire_line(5))
        again = connection.receive()
        assert isinstance(again, protocol.Failed)
        assert "id 5 is in use" in again.message
    eventually(lambda: len(agent.released) == MAX_WAITING)


def test_an_error_that_nobody_foresaw_is_still_an_answer(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    class Broken(OneModelAgent):
        def acquire(self, holder: Holder, model: str, version: str, timeout_s: float, gone: threading.Event) -> Grant:
            raise OSError(24, "Too many open files")

    agent = Broken(arena, model)
    with serving(agent, tmp_path) as path:
        with pytest.raises(PrefetcherError, match="Too many open files"):
            prefetcher.open("llama", socket_path=path, timeout_s=20)
        assert len(agent.released) == 1


def test_noise_on_the_socket_ends_only_its_own_connection(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        for noise in (b"hello\n", b'{"type": "granted"}\n', b"\x80\x04\x95\n", b'{"type": "acquire", "id": "x"}\n'):
            with raw_connection(path) as sock:
                sock.sendall(noise)
                assert sock.recv(100) == b""
        assert ask("status", socket_path=path) == b"null"


FORK = """
import os, sys, prefetcher
tensors = prefetcher.open("llama", socket_path=sys.argv[1])
if os.fork() == 0:
    before = tensors["layer.0.bias"].tolist()
    tensors.close()
    del tensors
    os._exit(0)
assert os.wait()[1] == 0
print("forked", flush=True)
sys.stdin.readline()
tensors.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def test_a_fork_does_not_give_its_parents_lease_back(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    fill(arena, model)
    agent = OneModelAgent(arena, model)
    with serving(agent, tmp_path) as path:
        child = subprocess.Popen([sys.executable, "-c", FORK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == b"forked\n"
            assert list(agent.held.values()) == [child.pid]
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"closed\n"
            assert not agent.held


def test_a_killed_agent_leaves_its_clients_what_they_map(model: ModelSource, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from weights_kit import OneModelAgent, fill, serving
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.manifest import scan_models_folder
source = scan_models_folder(Path(sys.argv[1])).source("llama")
arena = HostArena(64 << 20, name=sys.argv[3], lock="off")
fill(arena, source)
with serving(OneModelAgent(arena, source), Path(sys.argv[2])):
    print("serving", flush=True)
    sys.stdin.read()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    arguments = [str(model.folder.parent), str(tmp_path), f"killed-{os.getpid()}"]
    agent = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"serving\n"
        tensors = prefetcher.open("llama", socket_path=tmp_path / "run" / "agent.sock")
        agent.send_signal(signal.SIGKILL)
    for name, want in expected(model).items():
        assert (tensors[name] == want).all()
    tensors.close()
    with pytest.raises(UnavailableError, match="prefetcher up"):
        prefetcher.open("llama", socket_path=tmp_path / "run" / "agent.sock")
    arena = HostArena(64 * MB, name=arguments[2], lock="off")
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        prefetcher.open("llama", socket_path=path).close()  # the socket that it left was replaced
    arena.close()


# --- where the socket is ---


def test_a_path_longer_than_the_kernel_takes_works(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    before = open_files()
    with serving(OneModelAgent(arena, model), folder) as path:
        assert len(str(path)) > 107
        assert path.is_socket()
        prefetcher.open("llama", socket_path=path).close()
        with pytest.raises(UsageError, match="another agent answers"):
            LeaseServer(path, OneModelAgent(arena, model)).start()
    assert not path.exists()
    eventually(lambda: open_files() <= before)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_run_folder_that_others_may_write_is_refused(mode: int, arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(UsageError, match="of yours alone") as caught, serving(OneModelAgent(arena, model), tmp_path):
        pass
    assert caught.value.exit_code == 2
    assert not list((tmp_path / "run").iterdir())


def test_a_run_folder_that_is_a_link_or_a_file_is_refused(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="of yours alone"), serving(OneModelAgent(arena, model), tmp_path):
        pass
    (tmp_path / "run").unlink()
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="cannot be made"), serving(OneModelAgent(arena, model), tmp_path):
        pass


@pytest.mark.skipif(not MAY_BE_ANYBODY, reason="only root can give files away")
def test_a_folder_and_a_socket_of_another_user_are_refused(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(UsageError, match="of yours alone"), serving(OneModelAgent(arena, model), tmp_path):
        pass
    os.chown(tmp_path / "run", 0, 0)
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        os.chown(path, 65534, 65534)
        with pytest.raises(UnavailableError, match="belongs to another user"):
            prefetcher.open("llama", socket_path=path)


IMPOSTOR = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(fileno=int(sys.argv[1]))
sock.listen(1)
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not MAY_BE_ANYBODY, reason="only root can become another user")
def test_an_answer_by_a_process_of_another_user_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        command = [sys.executable, "-c", IMPOSTOR, str(listener.fileno())]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[listener.fileno()])
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"listening\n"
            with pytest.raises(UnavailableError, match="process of another user"):
                prefetcher.open("llama", socket_path=path)


STRANGER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
try:
    sock.connect(sys.argv[1])
    sock.sendall(b'{"type": "control", "id": 1, "verb": "status"}\\n')
    print(sock.recv(100))
except PermissionError:
    print("refused")
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""


@pytest.mark.skipif(not MAY_BE_ANYBODY, reason="only root can become another user")
def test_another_user_is_not_served_even_where_the_socket_may_be_opened(arena: HostArena, model: ModelSource, tmp_path: Path) -> None:
    with serving(OneModelAgent(arena, model), tmp_path) as path:
        answers = []
        for mode in (0o600, 0o666):
            path.chmod(mode)
            for folder in (path.parent, *path.parent.parents):
                if folder.stat().st_uid == 0 and folder != Path("/"):
                    folder.chmod(folder.stat().st_mode | 0o011)
            done = subprocess.run([sys.executable, "-c", STRANGER, path], capture_output=True, text=True, timeout=30)
            answers.append(done.stdout.strip())
        assert answers == ["refused", "b''"]


def test_agent_and_client_agree_where_the_socket_is(
    arena: HostArena, model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFETCHER_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert protocol.default_socket_path() == tmp_path / "runtime" / "prefetcher" / "agent.sock"
    monkeypatch.setenv("PREFETCHER_SOCKET", str(tmp_path / "own" / "a.sock"))
    assert protocol.default_socket_path() == tmp_path / "own" / "a.sock"
    with pytest.raises(UnavailableError, match=r"own/a\.sock.*PREFETCHER_SOCKET"):
        prefetcher.open("llama")
    server = LeaseServer(protocol.default_socket_path(), OneModelAgent(arena, model))
    server.start()
    try:
        prefetcher.open("llama").close()
        with pytest.raises(UnavailableError, match=r"other\.sock"):  # what is named wins
            prefetcher.open("llama", socket_path=tmp_path / "other.sock")
        monkeypatch.delenv("PREFETCHER_SOCKET")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
        with pytest.raises(UnavailableError, match="own/prefetcher/agent"):
            protocol.socket_path()
    finally:
        server.stop()


# --- nobody writes ---

WRITE = """
import mmap, os, sys
import prefetcher
from prefetcher.agent import protocol
from prefetcher.agent.protocol import Acquire
connection = protocol.connect(sys.argv[1], 20)
connection.send(Acquire(1, "llama"))
grant = connection.receive()
fds = connection.take_fds(connection.receive().count)
tries = {
    "write": lambda fd: os.pwrite(fd, b"x", 0),
    "truncate": lambda fd: os.ftruncate(fd, 0),
    "grow": lambda fd: os.ftruncate(fd, 1 << 30),
    "punch": lambda fd: os.posix_fallocate(fd, 0, 4096),
    "map": lambda fd: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ),
    "reopen": lambda fd: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
    "reopen and truncate": lambda fd: os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC),
}
if sys.argv[2] == "root":  # may open whatever it likes
    del tries["reopen"], tries["reopen and truncate"]
if sys.argv[2] == "hostile":
    tries["make writable"] = lambda fd: (os.fchmod(fd, 0o600), os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0))
for what, attempt in tries.items():
    for fd in fds:
        try:
            attempt(fd)
        except OSError:
            pass
        else:
            print(what)
"""


@pytest.mark.parametrize("kind", ["private", "memfd"])
def test_no_client_can_write_what_others_map(kind: str, model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefetcher.agent import hostfolder

    if kind == "memfd":
        monkeypatch.setattr(hostfolder, "choose", lambda *_, **__: hostfolder.HostFolder("memfd"))
    arena = HostArena(64 * MB, name=f"write-{os.getpid()}", lock="off")
    if kind == "private" and arena._folder._view < 0:
        arena.close()
        pytest.skip("this kernel makes no mount that can only be read")
    copy, _ = fill(arena, model)
    try:
        with serving(OneModelAgent(arena, model), tmp_path) as path:
            done = subprocess.run([sys.executable, "-c", WRITE, path, "hostile"], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("", "")
        for file, entry in zip(copy.files, model.manifest.files, strict=True):
            assert os.pread(file.fd, entry.bytes, 0) == (model.folder / entry.path).read_bytes()
    finally:
        arena.close()


def test_an_ordinary_client_cannot_write_files_in_a_folder_by_mistake(model: ModelSource, tmp_path: Path) -> None:
    tier = Path(f"/dev/shm/prefetcher-test-write-{os.getpid()}")
    arena = HostArena(64 * MB, folder=tier, lock="off")
    fill(arena, model)
    try:
        with serving(OneModelAgent(arena, model), tmp_path) as path:
            done = subprocess.run(
                [sys.executable, "-c", WRITE, path, "root" if MAY_BE_ANYBODY else "mistaken"], capture_output=True, text=True, timeout=60
            )
        assert (done.stdout, done.stderr) == ("", "")
    finally:
        arena.close()
        (tier / ".lock").unlink()
        tier.rmdir()


def test_errors_of_the_agent_keep_their_kind_and_wait() -> None:
    told = protocol.error_of(protocol.failed_of(1, NoRoomError("full", retry_after_s=3.0)))
    assert isinstance(told, NoRoomError)
    assert told.retry_after_s == 3.0
    assert type(protocol.error_of(protocol.Failed(1, "SystemExit", "x"))) is PrefetcherError
    assert struct.calcsize("ll") == 16  # the kernel's struct timeval, as the server sets it
