"""Large files in a folder or an object store, read by ranges and written in parts: where models come from and are published to.

Ranges of an object store go by plain HTTP with signed addresses into the caller's memory, so that a status, a `Retry-After` and an
`If-Match` are seen; addresses hold a signature and are in no message and no log. What can't be signed (a public bucket, some kinds of
credentials) is read by obstore, which says less of why it waits. Retrying is the caller's. Credentials come from the usual variables of a
store's cloud. Covers no manifests and no digests.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefetcher.errors import ChangedError, IntegrityError, NoRoomError, RateLimitedError, SettingsError, UnavailableError, UsageError
from prefetcher.ports import StoredObject, WeightsStore
from prefetcher.secrets import problem_of_place, without_secrets
from prefetcher_connectors.blobs import FolderBlobs, StoreBlobs

__all__ = ["FolderWeights", "StoreWeights", "weights_store_at"]

_CONNECT_S, _ANSWER_S = 3.0, 30.0
#: A signed address is used at once; a clock that is wrong by minutes is a store's business too.
_SIGNED_FOR = timedelta(minutes=15)
#: Between looks whether anybody still wants what is read.
_SLICE_BYTES = 1 << 20
_IDLE_CONNECTIONS = 64
_TOO_BUSY = (429, 503)


def weights_store_at(place: str | Path) -> WeightsStore:
    """The store at a path or address. Raises `SettingsError` for one that is none."""
    text = str(place)
    if problem := problem_of_place(text):
        raise SettingsError(f"{without_secrets(text)} can't hold models: {problem}")
    scheme, mark, rest = text.partition("://")
    if not mark:
        return FolderWeights(Path(text).expanduser())
    return FolderWeights(Path(rest)) if scheme == "file" else StoreWeights(text)


class FolderWeights:
    """Files of a folder, local or mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._blobs = FolderBlobs(self._folder)
        self.place = str(self._folder)

    def objects(self) -> list[StoredObject]:
        if not self._folder.is_dir():
            raise UnavailableError(f"{self._folder} is not there; mount it, or name another store", retry_after_s=1.0)
        found = []
        for root, folders, names in os.walk(self._folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(root, name)
                try:
                    status = path.stat()
                except OSError:
                    continue  # gone meanwhile, or a link to nowhere
                if not name.startswith(".") and stat.S_ISREG(status.st_mode):
                    relative = path.relative_to(self._folder).as_posix()
                    found.append(StoredObject(relative, status.st_size, _stamp(status), status.st_mtime_ns / 1e9))
        return found

    def read(self, path: str, most_bytes: int) -> bytes:
        found = self._blobs.read(path, most_bytes)
        if found is None:
            raise IntegrityError(f"{self.place}/{path} is not there")
        return found.content

    def read_range(self, found: StoredObject, start: int, into: memoryview, go_on: Callable[[], bool]) -> int:
        where = f"{self.place}/{found.path}"
        try:
            fd = os.open(self._folder / found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as exc:
            raise ChangedError(f"{where} is not there any more") from exc
        except OSError as exc:
            raise UnavailableError(f"{where} can't be opened ({exc.strerror})") from exc
        try:
            if _stamp(os.fstat(fd)) != found.tag:
                raise ChangedError(f"{where} was replaced while it was read")
            done = 0
            while done < len(into) and go_on():
                count = os.preadv(fd, [into[done : done + _SLICE_BYTES]], start + done)
                if count == 0:
                    break
                done += count
            return done
        except OSError as exc:
            raise UnavailableError(f"{where} can't be read ({exc.strerror})") from exc
        finally:
            os.close(fd)

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        at = self._folder / path
        beside = at.with_name(f".{at.name}.{os.getpid()}")
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("wb") as out:
                    for part in parts:
                        out.write(part)
                    out.flush()
                    os.fsync(out.fileno())
                beside.replace(at)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as exc:
            raise NoRoomError(f"{at} can't be written ({exc.strerror}); make room, or name another store") from exc

    def close(self) -> None:
        """Nothing is open."""


class StoreWeights:
    """Files of an object store. `place` has no secrets, and no address that is asked is in any message."""

    def __init__(self, address: str) -> None:
        self._blobs = StoreBlobs(address)
        self._store = self._blobs.store
        self.place = self._blobs.place
        self._guard = threading.Lock()
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._signs = True
        self._context: ssl.SSLContext | None = None

    def objects(self) -> list[StoredObject]:
        import obstore

        found = self._blobs.asked(lambda: obstore.list(self._store).collect())
        return [
            StoredObject(str(each["path"]), int(each["size"]), str(each.get("e_tag") or ""), each["last_modified"].timestamp())
            for each in found
        ]

    def read(self, path: str, most_bytes: int) -> bytes:
        found = self._blobs.read(path, most_bytes)
        if found is None:
            raise IntegrityError(f"{self.place}/{path} is not there")
        return found.content

    def read_range(self, found: StoredObject, start: int, into: memoryview, go_on: Callable[[], bool]) -> int:
        address = self._signed(found.path)
        return self._by_obstore(found, start, into) if address is None else self._by_http(address, found, start, into, go_on)

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        import obstore

        self._blobs.asked(lambda: obstore.put(self._store, path, parts, chunk_size=16 << 20, max_concurrency=4))

    def close(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _signed(self, path: str) -> str | None:
        """An address that may be read for some minutes, None where the store's credentials can sign none."""
        import obstore
        from obstore.exceptions import BaseError

        if not self._signs:
            return None
        try:
            address: str = obstore.sign(self._store, "GET", path, _SIGNED_FOR)
        except (BaseError, ValueError, TypeError, OSError):
            self._signs = False
            return None
        return address

    def _by_obstore(self, found: StoredObject, start: int, into: memoryview) -> int:
        import obstore
        from obstore.exceptions import PreconditionError

        options: Any = {"range": (start, start + len(into)), **({"if_match": found.tag} if found.tag else {})}
        try:
            content = self._blobs.asked(lambda: obstore.get(self._store, found.path, options=options).bytes())
        except (PreconditionError, FileNotFoundError) as exc:
            raise ChangedError(f"{self.place}/{found.path} was replaced while it was read") from exc
        done = min(len(content), len(into))
        into[:done] = memoryview(content)[:done]
        return done

    def _by_http(self, address: str, found: StoredObject, start: int, into: memoryview, go_on: Callable[[], bool]) -> int:
        where, parts = f"{self.place}/{found.path}", urlsplit(address)
        server = (parts.scheme, parts.netloc)
        headers = {"Range": f"bytes={start}-{start + len(into) - 1}", **({"If-Match": found.tag} if found.tag else {})}
        connection = self._connection(server)
        try:
            connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
            answer = connection.getresponse()
            if answer.status != 206:
                raise self._refused(where, answer)
            done = 0
            while done < len(into) and go_on():
                count = answer.readinto(into[done : done + _SLICE_BYTES])
                if count == 0:
                    break
                done += count
            complete = answer.isclosed() or answer.length == 0
            if complete:
                answer.close()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            raise UnavailableError(f"{where}: the store broke off ({type(exc).__name__})", retry_after_s=0.0) from None
        except BaseException:
            connection.close()
            raise
        if complete:
            self._give_back(server, connection)
        else:
            connection.close()
        return done

    def _refused(self, where: str, answer: http.client.HTTPResponse) -> Exception:
        """What an answer without the range means. Its text is not told: it may repeat what was signed."""
        status = answer.status
        if status in _TOO_BUSY:
            return RateLimitedError(f"{where}: the store is busy ({status})", retry_after_s=_retry_after_s(answer))
        if status in (404, 412):
            return ChangedError(f"{where} was replaced while it was read")
        if status == 416:
            return IntegrityError(f"{where} is shorter than it should be")
        if status in (401, 403):
            return UsageError(f"{where}: the store refuses this program ({status}); check its credentials, as AWS_ACCESS_KEY_ID")
        return UnavailableError(f"{where}: the store answers {status}", retry_after_s=0.0)

    def _connection(self, server: tuple[str, str]) -> http.client.HTTPConnection:
        with self._guard:
            idle = self._idle.get(server)
            if idle:
                return idle.pop()
        scheme, host = server
        if scheme == "https":
            self._context = self._context or ssl.create_default_context()
            made: http.client.HTTPConnection = http.client.HTTPSConnection(host, timeout=_CONNECT_S, context=self._context)
        else:
            made = http.client.HTTPConnection(host, timeout=_CONNECT_S)
        try:
            made.connect()
        except OSError as exc:
            raise UnavailableError(f"{self.place} does not answer ({type(exc).__name__})", retry_after_s=0.0) from None
        made.sock.settimeout(_ANSWER_S)
        return made

    def _give_back(self, server: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        with self._guard:
            idle = self._idle.setdefault(server, [])
            if len(idle) < _IDLE_CONNECTIONS and connection.sock is not None:
                idle.append(connection)
                return
        connection.close()


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


def _retry_after_s(answer: http.client.HTTPResponse) -> float:
    """Seconds of its Retry-After, which may be a date, by the store's own clock; 0 where it says none."""
    text = answer.headers.get("Retry-After", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        then, now = (email.utils.parsedate_to_datetime(date) for date in (text, answer.headers.get("Date", "")))
        return max(0.0, (then - now).total_seconds())
    except (ValueError, TypeError):
        return 0.0
