"""The lease socket: hands read-only descriptors to other processes and takes leases back, also from those that died.

Covers sockets, threads and whose lease is whose. What is granted, and after which wait, is decided behind `LeasePort`.
One thread reads each connection; each `Acquire` waits in a thread of its own, so that a holder that dies while it waits
is noticed at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from prefetcher.agent import protocol
from prefetcher.agent.protocol import (
    Acquire,
    Connection,
    Control,
    Descriptors,
    FileGrant,
    Granted,
    Release,
    Reply,
    Verb,
)
from prefetcher.core.types import WeightsKey
from prefetcher.errors import NoRoomError, PrefetcherError, UsageError
from prefetcher.telemetry.logs import log

__all__ = ["MAX_WAITING", "Grant", "GrantedFile", "Holder", "LeasePort", "LeaseServer"]

#: Requests that may wait on one connection: each is a thread. A program that opens more at once uses more connections, as `prefetcher.open`
#: does.
MAX_WAITING = 64

#: Where the process has no descriptor left, accepting again at once would only burn a core.
_ACCEPT_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease: `name` is unique for each lease of this agent's life; `pid` and `uid` are the peer's, from the
    kernel.
    """

    name: str
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class GrantedFile:
    """A descriptor that the server sends and closes, the file's path in its manifest, and its bytes."""

    fd: int
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A holder got this. `found` is `ready | moving | queued | absent`, `wait_s` seconds from asking to granting, `path` a folder of the
    files or ''."""

    key: WeightsKey
    source: Literal["host", "disk"]
    files: Sequence[GrantedFile]
    found: str
    wait_s: float
    path: str = ""


class LeasePort(Protocol):
    """What the agent does for the socket. Called from several threads."""

    def acquire(self, holder: Holder, model: str, version: str, timeout_s: float, gone: threading.Event) -> Grant:
        """Waits until the weights may be read and grants a lease, or raises. `gone` is set when nobody waits any more.

        Raises:
            PrefetcherError: told to the client as it is.
        """
        ...

    def release(self, holder: Holder) -> None:
        """The lease of `holder` ended, or it died while it waited. Called once for each `acquire`, also for one that
        raised.
        """
        ...

    def control(self, verb: Verb, model: str, version: str) -> msgspec.Struct | None:
        """Does what people ask for by hand, and answers with something that is JSON."""
        ...


class LeaseServer:
    """Listens at `path` (0600) from `start` to `stop`. A client that does not read its answer for `patience_s` seconds is hung up on."""

    def __init__(self, path: Path, port: LeasePort, *, patience_s: float = 30.0) -> None:
        self.path = path
        self.port = port
        self.patience_s = patience_s
        self._listener: socket.socket | None = None
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._connections: set[_Peer] = set()
        self._serial = 0

    def start(self) -> None:
        """Binds the socket; a socket that a killed agent left is replaced.

        Raises:
            UsageError: another agent answers there, or the path can't be bound.
        """
        protocol.make_run_folder(self.path.parent)
        listener = socket.socket(socket.AF_UNIX)
        old = os.umask(0o177)
        try:
            with protocol.socket_address(self.path) as address:
                if _answers(address):
                    raise UsageError(f"another agent answers at {self.path}; stop it, or give this one another socket with --socket")
                self.path.unlink(missing_ok=True)
                listener.bind(address)
            listener.listen(128)
        except OSError as exc:
            listener.close()
            raise UsageError(f"the socket {self.path} cannot be made ({exc.strerror or exc}); name another one with --socket") from exc
        except UsageError:
            listener.close()
            raise
        finally:
            os.umask(old)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="leases", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as exc:
                if not self._stopping.wait(_ACCEPT_AGAIN_S):
                    log().warning("lease_socket_refuses", reason=str(exc), then="it tries again")
                continue
            pid, uid = protocol.peer_of(sock)
            if uid not in {os.getuid(), 0}:
                sock.close()
                continue
            # Sending alone: a client may be silent for as long as it likes.
            seconds = int(self.patience_s)
            patience = struct.pack("ll", seconds, int((self.patience_s - seconds) * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            peer = _Peer(self, Connection(sock), pid, uid)
            with self._guard:
                self._connections.add(peer)
            if self._stopping.is_set():
                peer.hang_up()
            threading.Thread(target=peer.serve, name=f"lease-{pid}", daemon=True).start()

    def next_serial(self) -> int:
        with self._guard:
            self._serial += 1
            return self._serial

    def forget(self, peer: _Peer) -> None:
        with self._guard:
            self._connections.discard(peer)

    def stop(self) -> None:
        """Closes the socket and every connection; their leases are released. Clients keep what they map."""
        self._stopping.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self.path.unlink(missing_ok=True)
        with self._guard:
            peers = list(self._connections)
        for peer in peers:
            peer.hang_up()


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


class _Peer:
    """One connected process."""

    def __init__(self, server: LeaseServer, connection: Connection, pid: int, uid: int) -> None:
        self._server, self._connection, self._pid, self._uid = server, connection, pid, uid
        self._sending = threading.Lock()
        self._guard = threading.Lock()
        #: By request id: the holder, once granted.
        self._leases: dict[int, Holder] = {}
        self._waiting: set[int] = set()
        self._gone = threading.Event()

    def serve(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                match message:
                    case Acquire():
                        self._begin(message)
                    case Release():
                        self._release(message)
                    case Control():
                        self._control(message)
                    case _:
                        break
        except (OSError, msgspec.MsgspecError):
            pass
        finally:
            with self._guard:
                self._gone.set()
                held = list(self._leases.values())
                self._leases.clear()
            for holder in held:
                self._server.port.release(holder)
            self._server.forget(self)
            self.hang_up()  # ends a send that waits
            with self._sending:
                self._connection.close()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _send(self, *messages: tuple[msgspec.Struct, list[int]]) -> None:
        """Sends all, or hangs up: after a part of a message nothing more can be said."""
        with self._sending:
            try:
                for message, fds in messages:
                    self._connection.send(message, fds)
            except OSError:
                self.hang_up()

    def _begin(self, message: Acquire) -> None:
        with self._guard:
            taken = message.id in self._leases or message.id in self._waiting
            full = len(self._waiting) >= MAX_WAITING
            if not taken and not full:
                self._waiting.add(message.id)
        if taken or full:
            why = f"the request id {message.id} is in use" if taken else f"{MAX_WAITING} requests wait on one connection already"
            self._send((protocol.failed_of(message.id, NoRoomError(f"{why}; open another connection")), []))
            return
        threading.Thread(target=self._acquire, args=(message,), name="acquire", daemon=True).start()

    def _acquire(self, message: Acquire) -> None:
        port = self._server.port
        holder = Holder(f"{self._pid}:{self._server.next_serial()}", self._pid, self._uid)
        try:
            grant = port.acquire(holder, message.model, message.version, message.timeout_s, self._gone)
        except Exception as exc:  # noqa: BLE001 - without any answer the client would wait until its timeout
            port.release(holder)
            if not isinstance(exc, PrefetcherError):
                log().error("acquire_failed", model=message.model, reason=str(exc), exc_info=True)
            self._send((protocol.failed_of(message.id, exc), []))
        else:
            self._give(message, holder, grant)
        finally:
            with self._guard:
                self._waiting.discard(message.id)

    def _give(self, message: Acquire, holder: Holder, grant: Grant) -> None:
        fds = [f.fd for f in grant.files]
        try:
            with self._guard:
                alive = not self._gone.is_set()
                if alive:
                    self._leases[message.id] = holder
            if not alive:
                self._server.port.release(holder)
                return
            files = tuple(FileGrant(f.path, f.bytes) for f in grant.files)
            key = grant.key
            first = Granted(message.id, key.model, key.version, grant.source, files, grant.found, grant.wait_s, grant.path)
            step = protocol.FDS_A_MESSAGE
            parts = [fds[i : i + step] for i in range(0, len(fds), step)]
            self._send((first, []), *((Descriptors(message.id, len(p)), p) for p in parts))
        finally:
            for fd in fds:
                os.close(fd)

    def _release(self, message: Release) -> None:
        with self._guard:
            holder = self._leases.pop(message.lease, None)
        if holder is not None:
            self._server.port.release(holder)
        self._send((Reply(message.id), []))

    def _control(self, message: Control) -> None:
        try:
            body = self._server.port.control(message.verb, message.model, message.version)
        except PrefetcherError as exc:
            self._send((protocol.failed_of(message.id, exc), []))
            return
        self._send((Reply(message.id, msgspec.Raw(msgspec.json.encode(body))), []))
