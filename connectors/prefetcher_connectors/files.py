"""A request stream in a folder: append-only segments of JSON lines, durable before they are acknowledged.

A segment is named by the position of its first byte; a position is a byte offset in the whole log, so it stays true when old segments are
dropped. One process owns the folder (a file lock). A torn last line was never acknowledged and is cut off at the next start. Covers no
following of foreign log files (`controller.follow`).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prefetcher.core.types import ModelName, ModelVersion, NodeName, RequestSeen
from prefetcher.errors import NoRoomError, UnavailableError, UsageError
from prefetcher.ports import BadRecord, RequestBatch

__all__ = ["FileStream", "decode_record", "encode_record"]

_READ_BYTES = 1 << 20
#: Room that a log which was full must have again: a post of some rows.
_PROBE_BYTES = 64 << 10
_RETRY_AFTER_S = 5.0


class _Record(msgspec.Struct, omit_defaults=True):
    ts: float
    model: str
    count: int = 1
    user: str | None = None
    node: str | None = None
    version: str | None = None
    request_id: str | None = None
    mark: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Record).decode


def encode_record(request: RequestSeen, mark: str | None = None) -> bytes:
    """One line without its end."""
    return _encode(
        _Record(
            request.ts,
            request.model,
            request.count,
            request.user,
            request.node,
            request.version,
            request.request_id,
            mark,
        )
    )


def _to_request(record: _Record) -> RequestSeen:
    return RequestSeen(
        ts=record.ts,
        model=ModelName(record.model),
        count=record.count,
        user=record.user,
        node=None if record.node is None else NodeName(record.node),
        version=None if record.version is None else ModelVersion(record.version),
        request_id=record.request_id,
    )


def decode_record(line: bytes) -> RequestSeen:
    """The request in one line.

    Raises:
        ValueError: it is no record.
    """
    return _to_request(_decode(line))


class FileStream:
    """A request stream in `folder`. Safe for threads; concurrent appends share an fsync.

    Raises:
        UnavailableError: another process owns the folder.
        UsageError: the folder can't be made or written to.
    """

    def __init__(self, folder: Path, segment_bytes: int = 64_000_000, keep_segments: int = 16) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._keep = keep_segments
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise UsageError(
                f"{folder} cannot hold the request log ({exc.strerror}); name another folder with --state-dir"
            ) from exc
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._lock_fd)
            raise UnavailableError(
                f"{folder} is in use by another running prefetcher; stop it, or give another --state-dir"
            ) from exc
        self._write_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._mark: str | None = None
        #: Why the last append failed, '' when it did not.
        self._problem = ""
        self._open_last()

    def _segments(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit())

    def _path(self, base: int) -> Path:
        return self._folder / f"{base:020d}.jsonl"

    def _open_last(self) -> None:
        bases = self._segments()
        self._base = bases[-1] if bases else 0
        self._fd = os.open(self._path(self._base), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        whole = self._whole_lines(self._base, size)
        if whole != size:
            os.ftruncate(self._fd, whole)
        self._end = self._durable = self._base + whole
        for base in reversed(bases):
            self._mark = self._mark_in(base)
            if self._mark is not None:
                break

    def _whole_lines(self, base: int, size: int) -> int:
        """The length up to and with the last line end."""
        with self._path(base).open("rb") as file:
            at = size
            while at > 0:
                start = max(0, at - _READ_BYTES)
                file.seek(start)
                found = file.read(at - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                at = start
        return 0

    def _mark_in(self, base: int) -> str | None:
        mark = None
        with self._path(base).open("rb") as file:
            for line in file:
                if b'"mark"' in line:
                    try:
                        mark = _decode(line).mark or mark
                    except msgspec.MsgspecError:
                        continue
        return mark

    def append(self, requests: Sequence[RequestSeen], mark: str | None = None) -> int:
        if not requests:
            return self.end()
        last = len(requests) - 1
        lines = b"".join(
            encode_record(request, mark if i == last else None) + b"\n" for i, request in enumerate(requests)
        )
        with self._write_lock:
            try:
                if self._end - self._base >= self._segment_bytes:
                    self._roll()
                self._write(lines)
            except OSError as exc:
                raise self._full(exc) from exc
            self._end = mine = self._end + len(lines)
            if mark is not None:
                self._mark = mark
        with self._sync_lock:
            if self._durable < mine:
                with self._write_lock:
                    fd, end = self._fd, self._end
                    # The segment can't be closed by a roll while it is synced: a roll takes the write lock, and syncs itself.
                    try:
                        os.fsync(fd)
                    except OSError as exc:
                        raise self._full(exc) from exc
                self._durable = max(self._durable, end)
        self._problem = ""
        return mine

    def _full(self, error: OSError) -> NoRoomError:
        """The error for an append that failed; `check` says so, too, from now on."""
        self._problem = f"the request log in {self._folder} can't be written ({error.strerror}); make room there"
        return NoRoomError(f"{self._problem}, then send again", retry_after_s=_RETRY_AFTER_S)

    def check(self) -> str:
        """'' while rows can be appended. After a failure it tries whether a few would fit, so that room is noticed without rows."""
        if not self._problem:
            return ""
        with self._write_lock:
            if self._fd < 0:
                return self._problem
            try:
                # No line's end in it: whatever of it a crash may leave is cut off at the next start.
                self._write(b" " * _PROBE_BYTES)
                os.ftruncate(self._fd, self._end - self._base)
            except OSError:
                return self._problem
            self._problem = ""
        return ""

    def _write(self, lines: bytes) -> None:
        done = 0
        try:
            while done < len(lines):
                done += os.write(self._fd, memoryview(lines)[done:])
        except OSError:
            os.ftruncate(self._fd, self._end - self._base)
            raise

    def _roll(self) -> None:
        os.fsync(self._fd)
        # The old segment stays open until the new one is: on a full disk there is none.
        following = os.open(self._path(self._end), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.close(self._fd)
        self._durable = max(self._durable, self._end)
        self._base, self._fd = self._end, following
        folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def read(self, position: int, limit: int) -> RequestBatch:
        bases = self._segments()
        position = max(position, bases[0] if bases else 0)
        requests: list[RequestSeen] = []
        bad: list[BadRecord] = []
        durable = self._durable
        while position < durable and len(requests) + len(bad) < limit:
            base = max((b for b in bases if b <= position), default=0)
            ahead = [b for b in bases if b > position]
            until = min(durable, ahead[0] if ahead else durable)
            with self._path(base).open("rb") as file:
                file.seek(position - base)
                while position < until and len(requests) + len(bad) < limit:
                    line = file.readline()
                    if not line:
                        # Nothing where something durable should be: the file was cut by someone else.
                        bad.append(BadRecord(position, "the segment ends early"))
                        position = until
                        break
                    try:
                        requests.append(_to_request(_decode(line)))
                    except msgspec.MsgspecError as exc:
                        bad.append(BadRecord(position, str(exc)))
                    position += len(line)
        return RequestBatch(tuple(requests), position, tuple(bad))

    def end(self) -> int:
        return self._durable

    def last_mark(self) -> str | None:
        return self._mark

    def drop_before(self, position: int) -> None:
        with self._write_lock:
            bases = self._segments()
            ends = bases[1:]
            read = [base for base, end in zip(bases, ends, strict=False) if end <= position]
            for base in read[: max(0, len(read) - self._keep)]:
                self._path(base).unlink(missing_ok=True)

    def close(self) -> None:
        with self._write_lock:
            if self._fd >= 0:
                os.fsync(self._fd)
                os.close(self._fd)
                os.close(self._lock_fd)
                self._fd = -1
