"""One log in a folder: append-only segments of lines, durable before they are acknowledged.

A segment is named by the position of its first byte; a position is a byte offset in the whole log, so it stays true when old segments are
dropped. One process owns the folder (a file lock). A torn last line was never acknowledged and is cut off at the next start.

A record is its value and a line's end, so that the common case, JSON on one line, can be searched with `grep`. A value that holds a line's
end or begins with `!`, or has a mark, stands after a head: `!m "the mark"<tab>value`, `!e the value, escaped`, `!me "the mark"<tab>…`.
Lines of JSON with a field `mark`, as older versions wrote them, give their whole line as the value, and the field as the mark.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from prefetcher.errors import NoRoomError, UnavailableError, UsageError

__all__ = ["Lines", "SegmentLog"]

_READ_BYTES = 1 << 20
#: Room that a log which was full must have again: a post of some rows.
_PROBE_BYTES = 64 << 10
_RETRY_AFTER_S = 5.0
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class _Marked(msgspec.Struct):
    mark: str | None = None


_json = msgspec.json.Encoder().encode
_marked = msgspec.json.Decoder(_Marked).decode
_text = msgspec.json.Decoder(str).decode


def _line(value: bytes, mark: str | None) -> bytes:
    escaped = b"\n" in value
    if mark is None and not escaped and not value.startswith(b"!"):
        return value + b"\n"
    if escaped:
        value = value.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    # JSON text holds no raw tab: the first one ends the mark.
    head = b"" if mark is None else _json(mark) + b"\t"
    return b"!%s%s %s%s\n" % (b"m" if mark is not None else b"", b"e" if escaped else b"", head, value)


def _value(line: bytes) -> bytes:
    """The value in a line, which has lost its end. A line that only looks as if it had a head is its own value."""
    if not line.startswith(b"!"):
        return line
    flags, _, value = line[1:].partition(b" ")
    if b"m" in flags:
        value = value.partition(b"\t")[2]
    if b"e" in flags:
        value = b"\\".join(part.replace(b"\\n", b"\n") for part in value.split(b"\\\\"))
    return value


def _mark(line: bytes) -> str | None:
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        if line.startswith(b"!"):
            flags, _, rest = line[1:].partition(b" ")
            return _text(rest.partition(b"\t")[0]) if b"m" in flags else None
        return _marked(line).mark
    return None


class Lines(NamedTuple):
    """Values with their positions, where to read on, and what was not there: `lost` counts pieces, not records, which nobody can tell."""

    positions: Sequence[int]
    values: Sequence[bytes]
    next_position: int
    lost: int = 0


class SegmentLog:
    """The log in `folder`. Safe for threads; concurrent appends share an fsync. `old_marks`: lines of older versions may hold some.

    Raises:
        UnavailableError: another process owns the folder.
        UsageError: the folder can't be made or written to.
    """

    def __init__(self, folder: Path, segment_bytes: int, keep_segments: int, *, old_marks: bool = False) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._keep = keep_segments
        self._old_marks = old_marks
        self._log = structlog.get_logger()
        self._write_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._mark: str | None = None
        self._mark_known = False
        #: Why the last append failed, '' when it did not.
        self._problem = ""
        self._lock_fd = self._fd = -1
        try:
            self._open()
        except BaseException:
            self._close_files()
            raise

    def _open(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise UnavailableError(f"{self._folder} is in use by another running prefetcher; stop it, or give another --state-dir") from exc
        except OSError as exc:
            raise UsageError(f"{self._folder} cannot hold a log ({exc.strerror}); name another folder with --state-dir") from exc
        #: First positions of the segments, rising; replaced, never changed, so that readers need no lock.
        self._bases = sorted(int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit()) or [0]
        try:
            self._fd = os.open(self._path(self._bases[-1]), _FLAGS, 0o600)
            size = os.fstat(self._fd).st_size
            whole = self._whole_lines(size)
            if whole != size:
                os.ftruncate(self._fd, whole)
        except OSError as exc:
            raise UsageError(f"{self._path(self._bases[-1])} can't be read and written ({exc.strerror})") from exc
        #: Written, and written and synced.
        self._end = self._durable = self._bases[-1] + whole

    def _path(self, base: int) -> Path:
        return self._folder / f"{base:020d}.jsonl"

    def _whole_lines(self, size: int) -> int:
        """The length of the last segment up to and with its last line end."""
        at = size
        while at > 0:
            start = max(0, at - _READ_BYTES)
            found = os.pread(self._fd, at - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            at = start
        return 0

    def append(self, values: Sequence[bytes], mark: str | None = None) -> int:
        """Appends in order and returns the position after them, once they are durable. `mark` is kept with the last of them.

        Raises:
            NoRoomError: the disk is full; nothing was appended.
            UnavailableError: the log is closed, or the disk failed.
        """
        last = len(values) - 1
        data = b"".join([_line(value, mark if i == last else None) for i, value in enumerate(values)])
        with self._write_lock:
            self._check_open()
            try:
                if self._end - self._bases[-1] >= self._segment_bytes:
                    self._roll()
                self._write(data)
            except OSError as exc:
                raise self._full(exc) from exc
            self._end = mine = self._end + len(data)
            if mark is not None and values:
                self._mark, self._mark_known = mark, True
        with self._sync_lock:
            if self._durable < mine:
                with self._write_lock:
                    self._check_open()
                    # A segment can't be closed by a roll while it is synced by this copy.
                    fd, end = os.dup(self._fd), self._end
                try:
                    os.fsync(fd)
                except OSError as exc:
                    raise self._full(exc) from exc
                finally:
                    os.close(fd)
                with self._write_lock:  # a roll moves it, too
                    self._durable = max(self._durable, end)
        self._problem = ""
        return mine

    def _check_open(self) -> None:
        if self._fd < 0:
            raise UnavailableError(f"the log in {self._folder} is closed")

    def _full(self, error: OSError) -> NoRoomError:
        """The error for an append that failed; `check` says so, too, from now on."""
        self._problem = f"the log in {self._folder} can't be written ({error.strerror}); make room there"
        return NoRoomError(f"{self._problem}, then send again", retry_after_s=_RETRY_AFTER_S)

    def check(self) -> str:
        """'' while records can be appended. After a failure it tries whether a few would fit, so that room is noticed without records."""
        if not self._problem:
            return ""
        with self._write_lock:
            if self._fd < 0:
                return self._problem
            try:
                # No line's end in it: whatever of it a crash may leave is cut off at the next start.
                self._write(b" " * _PROBE_BYTES)
                os.ftruncate(self._fd, self._end - self._bases[-1])
            except OSError:
                return self._problem
            self._problem = ""
        return ""

    def _write(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, memoryview(data)[done:])
        except OSError:
            os.ftruncate(self._fd, self._end - self._bases[-1])
            raise

    def _roll(self) -> None:
        os.fsync(self._fd)
        # The old segment stays open until the new one is: on a full disk there is none.
        following = os.open(self._path(self._end), _FLAGS, 0o600)
        os.close(self._fd)
        self._durable = max(self._durable, self._end)
        self._bases, self._fd = [*self._bases, self._end], following
        folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)

    def read(self, position: int, limit: int) -> Lines:
        """Up to `limit` durable records of one segment from `position` on; from the oldest one kept if that one is not there."""
        # In this order: a segment that begins before `durable` is among them.
        durable, bases = self._durable, self._bases
        lost = int(position < bases[0])
        if position > durable:
            self._log.warning("stream_made_anew", folder=str(self._folder), asked=position, oldest=bases[0], end=durable)
            return Lines((), (), bases[0])
        position = max(position, bases[0])
        if position >= durable or limit <= 0:
            return Lines((), (), position, lost)
        base = max(base for base in bases if base <= position)
        until = min([durable, *(b for b in bases if b > position)])
        # Room for what is asked for, as records usually are; not a whole block for one.
        size = min(_READ_BYTES, max(1 << 14, limit << 10))
        try:
            with self._path(base).open("rb", buffering=0) as file:
                while True:
                    file.seek(position - base)
                    data = file.read(min(size, until - position)) or b""
                    whole = data.rfind(b"\n") + 1
                    if whole or len(data) < min(size, until - position) or position + len(data) >= until:
                        break
                    size *= 8  # one record is longer than that
        except FileNotFoundError:
            whole = 0
            if base not in self._bases:  # dropped meanwhile
                return self.read(position, limit)
        if not whole:
            # Nothing where something durable should be: the file was cut or removed by someone else.
            self._log.error("segment_ends_early", path=str(self._path(base)), position=position, until=until)
            return Lines((), (), until, lost + 1)
        lines = data[: whole - 1].split(b"\n", limit)[:limit] if limit < whole else data[: whole - 1].split(b"\n")
        positions = list(accumulate(map(len, lines), lambda at, length: at + length + 1, initial=position))
        following = positions.pop()
        values = lines if b"!" not in data else [_value(line) for line in lines]
        return Lines(positions, values, following, lost)

    def segment(self) -> int:
        """The segment that is written to."""
        return self._bases[-1]

    def start(self) -> int:
        """The position of the oldest record kept."""
        return self._bases[0]

    def end(self) -> int:
        """The position after the last durable record."""
        return self._durable

    def last_mark(self) -> str | None:
        """The mark that was appended last, if any. The first time, segments are searched for it, newest first."""
        with self._write_lock:
            if not self._mark_known:
                self._mark = next((mark for base in reversed(self._bases) if (mark := self._mark_in(base)) is not None), None)
                self._mark_known = True
            return self._mark

    def _mark_in(self, base: int) -> str | None:
        mark = None
        with self._path(base).open("rb") as file:
            for line in file:
                if line.startswith(b"!m") or (self._old_marks and b'"mark"' in line):
                    mark = _mark(line[:-1]) or mark
        return mark

    def drop_before(self, position: int) -> None:
        """Removes segments that end by `position`, but the last `keep_segments` of them."""
        with self._write_lock:
            passed = [base for base, end in zip(self._bases, self._bases[1:], strict=False) if end <= position]
            gone = passed[: max(0, len(passed) - self._keep)]
            if gone:
                self._bases = self._bases[len(gone) :]
            for base in gone:
                self._path(base).unlink(missing_ok=True)

    def close(self) -> None:
        with self._write_lock:
            if self._fd >= 0:
                with contextlib.suppress(OSError):
                    os.fsync(self._fd)
            self._close_files()

    def _close_files(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1
