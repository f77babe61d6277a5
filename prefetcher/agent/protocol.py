"""What a client and the agent say to each other over the lease socket: JSON lines, and read-only descriptors beside
them.

Covers the messages, their framing and where the socket is. No pickle: a message is one of the types below or the
connection ends. A `Granted` line is followed by `Descriptors` lines, each sent with up to `FDS_A_MESSAGE` descriptors
(SCM_RIGHTS), in file order.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from prefetcher import errors
from prefetcher.errors import PrefetcherError, TemporaryError, UnavailableError, UsageError, WeightsError

__all__ = [
    "SOCKET_NAME",
    "Acquire",
    "Connection",
    "Control",
    "Descriptors",
    "Failed",
    "FileGrant",
    "Granted",
    "Release",
    "Reply",
    "Verb",
    "connect",
    "default_run_folder",
    "default_socket_path",
    "error_of",
    "failed_of",
    "make_run_folder",
    "peer_of",
    "socket_address",
    "socket_path",
]

SOCKET_NAME = "agent.sock"

#: The kernel passes at most 253 descriptors in one message.
FDS_A_MESSAGE = 200

#: Longer than any message: a model of 1,000 shards is named in about 100 kB.
MAX_LINE_BYTES = 8 << 20

#: The kernel's bound for a socket's path is 108 with the byte that ends it.
_MAX_ADDRESS_BYTES = 107

Verb = Literal["status", "pin", "unpin", "load", "evict"]


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Asks for a lease. `timeout_s` is how long the answer may take; `version` '' means the one that serves."""

    id: int
    model: str
    version: str = ""
    timeout_s: float = 600.0


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Gives the lease back that was granted to the request `lease`."""

    id: int
    lease: int


class Control(msgspec.Struct, frozen=True, tag="control"):
    """What people do by hand; `model` is empty for status, on and off."""

    id: int
    verb: Verb
    model: str = ""
    version: str = ""


class FileGrant(msgspec.Struct, frozen=True):
    """One file of a grant: its path in the manifest and its bytes."""

    path: str
    bytes: int


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A lease. `source` is the tier that is read: `host`, or `disk` where the decision bypassed host memory. `path` is a folder of the same
    files, '' where the agent gives no paths."""

    id: int
    model: str
    version: str
    source: Literal["host", "disk"]
    files: tuple[FileGrant, ...]
    found: str = ""
    wait_s: float = 0.0
    path: str = ""


class Descriptors(msgspec.Struct, frozen=True, tag="descriptors"):
    """`count` descriptors of the grant `id` come with this line."""

    id: int
    count: int


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to `Release` and `Control`; `body` is JSON of its own kind."""

    id: int
    body: msgspec.Raw = msgspec.Raw(b"null")


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed: an error's class name and its one line."""

    id: int
    error: str
    message: str
    retry_after_s: float = 0.0


Message = Acquire | Release | Control | Granted | Descriptors | Reply | Failed
_decoder = msgspec.json.Decoder(Message)


def failed_of(request: int, exc: Exception) -> Failed:
    """An error as a message; anything that is not ours goes as a plain failure."""
    name = type(exc).__name__ if isinstance(exc, PrefetcherError) else "PrefetcherError"
    return Failed(request, name, str(exc), exc.retry_after_s if isinstance(exc, TemporaryError) else 0.0)


def error_of(failed: Failed) -> PrefetcherError:
    """The error that a message stands for."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type):
        if issubclass(kind, TemporaryError):
            return kind(failed.message, retry_after_s=failed.retry_after_s)
        if issubclass(kind, WeightsError | UsageError):
            return kind(failed.message)
    return PrefetcherError(failed.message)


class Connection:
    """One side of a connected socket. Sending is safe from several threads when the caller holds one lock for it;
    reading is not.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    def send(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        data = memoryview(msgspec.json.encode(message) + b"\n")
        sent = 0
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = self.sock.sendmsg([data], rights)
        self.sock.sendall(data[sent:])

    def receive(self) -> Message | None:
        """The next message, or None at the end of the connection.

        Raises:
            msgspec.MsgspecError: what came is no message.
            TimeoutError: nothing came within the socket's timeout.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise msgspec.DecodeError(f"a line of more than {MAX_LINE_BYTES} bytes")
            data, fds, flags, _ = socket.recv_fds(self.sock, 65536, FDS_A_MESSAGE + 50, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
            if flags & socket.MSG_CTRUNC:
                raise msgspec.DecodeError("this process may open too few files; raise `ulimit -n`")
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return _decoder.decode(line)

    def take_fds(self, count: int) -> list[int]:
        """The first `count` descriptors that came and were not taken yet."""
        if len(self._fds) < count:
            raise msgspec.DecodeError(f"{count} descriptors were announced and {len(self._fds)} came")
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self.sock.close()


def default_run_folder() -> Path:
    """$XDG_RUNTIME_DIR/prefetcher, else /tmp/prefetcher-UID. It is not created here."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "prefetcher" if runtime else Path(f"/tmp/prefetcher-{os.getuid()}")


def default_socket_path() -> Path:
    """Where an agent listens, and a client asks, when nobody names a socket: $PREFETCHER_SOCKET, else the default run folder's."""
    named = os.environ.get("PREFETCHER_SOCKET")
    return Path(named) if named else default_run_folder() / SOCKET_NAME


def make_run_folder(folder: Path) -> None:
    """Creates the run folder, 0700.

    Raises:
        UsageError: it belongs to another user or others may write it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise UsageError(f"the run folder {folder} cannot be made ({exc.strerror}); name another one with --socket") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(f"{folder} is not a folder of yours alone; remove it, or name a socket in another folder with --socket")


def socket_path(given: str | Path | None = None) -> Path:
    """The agent's socket: the given one, else the default; where the default isn't there, the one of this user's agent that started with
    another environment (a service has no $XDG_RUNTIME_DIR, a login has).

    Raises:
        UnavailableError: nothing is there, or it belongs to somebody else.
    """
    path = Path(given) if given else default_socket_path()
    if not given and not os.environ.get("PREFETCHER_SOCKET"):
        user = os.getuid()
        others = (Path(f"/run/user/{user}/prefetcher", SOCKET_NAME), Path(f"/tmp/prefetcher-{user}", SOCKET_NAME))
        path = next((other for other in (path, *others) if _owner(other) == user), path)
    owner = _owner(path)
    if owner is None:
        raise UnavailableError(f"no agent at {path}; start one with `prefetcher up`, or set PREFETCHER_SOCKET")
    if owner not in {os.getuid(), 0}:
        raise UnavailableError(f"{path} belongs to another user; set PREFETCHER_SOCKET to your agent's socket")
    return path


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """What to bind or connect to for a socket at `path`: the kernel takes 107 bytes, so a longer path goes by its folder's descriptor."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other side, from the kernel."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def connect(where: str | Path | None, timeout_s: float) -> Connection:
    """A connection to the agent at `where` (as in `socket_path`), whose user was checked.

    Raises:
        UnavailableError: no agent answers there, or not one of this user's or root's.
    """
    path = socket_path(where)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        with socket_address(path) as address:
            sock.connect(address)
        uid = peer_of(sock)[1]
    except OSError as exc:
        sock.close()
        raise UnavailableError(f"the agent at {path} does not answer; start one with `prefetcher up`") from exc
    if uid not in {os.getuid(), 0}:
        sock.close()
        raise UnavailableError(f"at {path} answers a process of another user; set PREFETCHER_SOCKET to your agent's socket")
    return Connection(sock)
