"""What a client and the agent say to each other over the lease socket: JSON lines, and read-only descriptors beside
them.

Covers the messages, their framing and where the socket is. No pickle: a message is one of the types below or the
connection ends. A `Granted` line is followed by `Descriptors` lines, each sent with up to `FDS_A_MESSAGE` descriptors
(SCM_RIGHTS), in file order.
"""

from __future__ import annotations

import array
import os
import socket
import stat
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
    "default_run_folder",
    "error_of",
    "failed_of",
    "socket_path",
]

SOCKET_NAME = "agent.sock"

#: The kernel passes at most 253 descriptors in one message.
FDS_A_MESSAGE = 200

#: Longer than any message: a model of 1,000 shards is named in about 100 kB.
MAX_LINE_BYTES = 8 << 20

Verb = Literal["status", "pin", "unpin", "load", "evict", "on", "off"]


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
    """A lease. `source` is the tier that is read: `host`, or `disk` where the decision bypassed host memory."""

    id: int
    model: str
    version: str
    source: Literal["host", "disk"]
    files: tuple[FileGrant, ...]
    found: str = ""
    wait_s: float = 0.0


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
                raise msgspec.DecodeError("too many descriptors at once, or this process may open no more (ulimit -n)")
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


def make_run_folder(folder: Path) -> None:
    """Creates the run folder, 0700.

    Raises:
        UsageError: it belongs to another user or others may write it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise UsageError(f"the run folder {folder} cannot be made ({exc.strerror}); name another one") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(f"{folder} is not a folder of yours alone; remove it or name another run folder")


def socket_path(given: str | Path | None = None) -> Path:
    """The agent's socket: the given one, else $PREFETCHER_SOCKET, else the one in the default run folder.

    Raises:
        UnavailableError: nothing is there, or it belongs to somebody else.
    """
    path = Path(given or os.environ.get("PREFETCHER_SOCKET") or default_run_folder() / SOCKET_NAME)
    try:
        owner = path.stat().st_uid
    except OSError as exc:
        raise UnavailableError(f"no agent at {path}; start one with `prefetcher up`, or set PREFETCHER_SOCKET") from exc
    if owner not in {os.getuid(), 0}:
        raise UnavailableError(f"{path} belongs to another user; set PREFETCHER_SOCKET to your agent's socket")
    return path
