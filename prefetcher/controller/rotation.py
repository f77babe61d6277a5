"""Which files a followed log is in: the log itself and those that it was rotated to, in the order in which they were written.

Knows names with a number (`log.1` is newer than `log.2`) and with a date (`log-20260101`); compressed files are none of them. Reads no
content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LogFile", "Place", "files_after", "find_file"]

_NUMBER = re.compile(r"\.(\d{1,5})$")
_DATE = re.compile(r"[-.](\d{4}-?\d\d-?\d\d(?:[-_T.]?\d+)*)$")


@dataclass(frozen=True, slots=True)
class Place:
    """How far was read: bytes of the file with this inode, which was written to last at `mtime_ns` as far as was known."""

    inode: int
    offset: int
    mtime_ns: int

    def mark(self) -> str:
        return f"{self.inode}:{self.offset}:{self.mtime_ns}"

    @classmethod
    def from_mark(cls, mark: str | None) -> Place | None:
        """The place that a mark says; None for no mark, or one that is not ours."""
        parts = (mark or "").split(":")
        if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
            return None
        # Marks without a time were written by earlier versions: nothing counts as newer by its time then.
        inode, offset, mtime_ns = (*map(int, parts), 1 << 63)[:3]
        return cls(inode, offset, mtime_ns)


@dataclass(frozen=True, slots=True)
class LogFile:
    path: Path
    inode: int
    size: int
    mtime_ns: int


def find_file(log: Path, inode: int) -> LogFile | None:
    """The file with this inode among those whose names begin with the log's; None when it is gone."""
    return next((found for found in _files(log) if found.inode == inode), None)


def files_after(log: Path, place: Place) -> list[LogFile]:
    """The files that were begun after that of `place`, oldest first: by names where its own is known, else by times and the log itself."""
    files = [(order, found) for found in _files(log) if (order := _order(log, found)) is not None]
    own = next((order for order, found in files if found.inode == place.inode), None)
    if own is None:
        newer = [(order, found) for order, found in files if found.mtime_ns > place.mtime_ns or order == _LOG]
    else:
        # Numbers and dates say nothing of one another.
        newer = [(order, found) for order, found in files if order > own and order[0] in (own[0], _LOG[0])]
    return [found for _, found in sorted(newer, key=lambda entry: entry[0])]


_LOG = (2, "", 0)


def _order(log: Path, file: LogFile) -> tuple[int, str, int] | None:
    """Sorts files by age, oldest first; None for a name that says nothing of it."""
    if file.path.name == log.name:
        return _LOG
    rest = file.path.name.removeprefix(log.name)
    if found := _NUMBER.fullmatch(rest):
        return 1, "", -int(found[1])
    if found := _DATE.fullmatch(rest):
        return 0, re.sub(r"\D", "", found[1]), 0
    return None


def _files(log: Path) -> Iterator[LogFile]:
    try:
        names = sorted(os.listdir(log.parent))
    except FileNotFoundError:
        return
    for name in names:
        if not name.startswith(log.name):
            continue
        try:
            found = (log.parent / name).stat()
        except FileNotFoundError:
            continue
        yield LogFile(log.parent / name, found.st_ino, found.st_size, found.st_mtime_ns)
