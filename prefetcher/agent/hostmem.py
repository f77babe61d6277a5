"""The host tier's memory: one exact-length tmpfs file a shard, allocated before it is read, locked, never rewritten.

Covers the byte ledger and the life of copies (begin, publish, read-only descriptors, trim, evict, collect, adopt). Where the
files lie and how memory is asked for is in `hostfolder`; filling them is `loader`'s work.

A copy's bytes count from `begin` until the kernel has them back: an evicted file is unlinked at once, and its bytes are
given back only when no other process has it open or mapped. Clients get descriptors of their own, so a write lease on
ours (fcntl F_SETLEASE) is granted exactly when they are gone.

A copy of which only the first blocks are to stay becomes a part: it counts with what it keeps, nobody sees more of it than the files that
it keeps whole, and `begin` goes on with it. That is done only to files that nobody else has open or mapped, which a write lease must prove:
nobody ever reads a hole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefetcher.agent import hostfolder
from prefetcher.agent.files import BLOCK_BYTES, block_digest
from prefetcher.agent.hostfolder import HostFolder, LockPolicy
from prefetcher.agent.manifest import FileEntry, Manifest, ModelSource
from prefetcher.core.types import ModelName, WeightsKey
from prefetcher.errors import NoRoomError

__all__ = ["ArenaUsage", "HostArena", "HostCopy", "HostFile"]

_ALLOCATE_BYTES = 64 << 20


class HostFile:
    """One shard in host memory: our read-write descriptor, and a mapping while it is filled or locked."""

    def __init__(self, entry: FileEntry, fd: int, *, huge_advice: bool) -> None:
        self.entry = entry
        self.fd = fd
        try:
            os.ftruncate(fd, entry.bytes)
            self.map = mmap.mmap(fd, entry.bytes)
        except OSError:
            os.close(fd)
            raise
        self.view = memoryview(self.map)
        self.mapped = True
        self.locked = False
        if huge_advice:
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE)

    def remap(self) -> None:
        """Maps it again, if it is not. Raises OSError."""
        if not self.mapped:
            self.map = mmap.mmap(self.fd, self.entry.bytes)
            self.view = memoryview(self.map)
            self.mapped = True

    def unmap(self) -> None:
        """Unmaps, which also unlocks."""
        self.view.release()
        with contextlib.suppress(ValueError):
            self.map.close()
        self.locked = self.mapped = False

    def held_elsewhere(self) -> bool:
        """Whether any other descriptor or mapping of the file exists, in any process."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return True
        except OSError:
            return False  # a filesystem without leases: the machine's own count of holders must do
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def is_ours_alone(self) -> bool:
        """Whether it is certain that there is no other descriptor or mapping of the file: what is not known is taken to be one."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@dataclass(slots=True)
class HostCopy:
    """One version of one model in host memory. Nobody but the loader sees it before `state` is `published`.

    `bytes` is what it counts with; the first `kept_bytes` are verified already where it was a part.
    """

    manifest: Manifest
    files: list[HostFile]
    name: str
    state: Literal["loading", "published", "part", "evicted"] = "loading"
    bytes: int = 0
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        self.bytes = self.manifest.bytes

    @property
    def key(self) -> WeightsKey:
        return self.manifest.key

    @property
    def whole_files(self) -> int:
        """How many of its files may be read: all once it is published, of a part the first ones that it keeps whole, else none."""
        if self.state == "published":
            return len(self.files)
        count, end = 0, 0
        for entry in self.manifest.files if self.state == "part" else ():
            end += entry.bytes
            if end > self.kept_bytes:
                break
            count += 1
        return count

    def whole_blocks(self, most_bytes: int) -> int:
        """Bytes of its first blocks, as many as `most_bytes` have room for."""
        taken = 0
        for entry in self.manifest.files:
            for start in range(0, entry.bytes, BLOCK_BYTES):
                block = min(BLOCK_BYTES, entry.bytes - start)
                if taken + block > most_bytes:
                    return taken
                taken += block
        return taken


@dataclass(frozen=True, slots=True)
class ArenaUsage:
    """Bytes. `part`: of copies that kept some; `lingering`: evicted and still mapped by somebody; `allocated`: what the kernel counts for
    all."""

    budget_bytes: int
    loading_bytes: int
    published_bytes: int
    part_bytes: int
    lingering_bytes: int
    locked_bytes: int
    allocated_bytes: int

    @property
    def taken_bytes(self) -> int:
        return self.loading_bytes + self.published_bytes + self.part_bytes + self.lingering_bytes


def _file_name(index: int) -> str:
    return f"{index:05d}.safetensors"


def _copy_name(key: WeightsKey) -> str:
    return hashlib.sha256(f"{key.model}\0{key.version}".encode()).hexdigest()[:24]


class HostArena:
    """The host tier of one node, `budget_bytes` of it. Safe to call from several threads.

    Raises (on opening, when nothing was created):
        BudgetError: the budget is larger than the machine or the given folder.
        LockLimitError: `lock` is `require` and the limit of locked memory is below the budget.
        UsageError: another agent has the folder, or it can't be used; `with_path`, and no path leads to any place.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        folder: Path | None = None,
        lock: LockPolicy = "auto",
        name: str = "agent",
        with_path: bool = False,
    ) -> None:
        hostfolder.check_budget(budget_bytes)
        hostfolder.allow_files()
        self.lock_warning = hostfolder.check_lock(lock, budget_bytes)
        self.budget_bytes = budget_bytes
        self._locking = lock != "off" and self.lock_warning is None
        self._folder: HostFolder = hostfolder.choose(budget_bytes, folder, name, with_path=with_path)
        self._guard = threading.Lock()
        self._copies: dict[WeightsKey, HostCopy] = {}
        self._lingering: list[HostCopy] = []
        self._serial = 0

    @property
    def kind(self) -> str:
        """`given`, `mount`, `private`, `shm` or `memfd`."""
        return self._folder.kind

    @property
    def huge(self) -> bool:
        return self._folder.huge

    def usage(self) -> ArenaUsage:
        with self._guard:
            copies = [*self._copies.values(), *self._lingering]
            files = [f for c in copies for f in c.files]
            return ArenaUsage(
                self.budget_bytes,
                sum(c.bytes for c in copies if c.state == "loading"),
                sum(c.bytes for c in copies if c.state == "published"),
                sum(c.bytes for c in copies if c.state == "part"),
                sum(c.bytes for c in copies if c.state == "evicted"),
                sum(f.entry.bytes for f in files if f.locked),
                sum(f.allocated_bytes() for f in files),
            )

    def copy(self, key: WeightsKey) -> HostCopy | None:
        """The published copy, if there is one."""
        copy = self._copies.get(key)
        return copy if copy is not None and copy.state == "published" else None

    def part(self, key: WeightsKey) -> HostCopy | None:
        """The part that is there, if there is one."""
        copy = self._copies.get(key)
        return copy if copy is not None and copy.state == "part" else None

    def begin(self, manifest: Manifest) -> HostCopy:
        """Takes the budget for one model and creates its files, empty; `allocate` makes the memory real. Of a part the rest is taken.

        Raises:
            NoRoomError: the budget or the memory does not suffice now, or the key is there already.
        """
        self.collect()
        with self._guard:
            part = self.part(manifest.key)
            if manifest.key in self._copies and part is None:
                raise NoRoomError(f"{manifest.model} is already in host memory or on its way")
            taken = sum(c.bytes for c in self._copies.values() if c is not part) + sum(c.bytes for c in self._lingering)
            if taken + manifest.bytes > self.budget_bytes:
                raise NoRoomError(
                    f"{manifest.model} needs {manifest.bytes} bytes of host memory, {self.budget_bytes - taken} are free; evict first"
                )
            if part is not None:
                return self._go_on(part)
            copy = HostCopy(manifest, [], self._hidden_name())
            try:
                self._folder.make(copy.name)
                for index, entry in enumerate(manifest.files):
                    fd = self._folder.create(copy.name, _file_name(index))
                    copy.files.append(HostFile(entry, fd, huge_advice=self._folder.kind == "memfd"))
            except OSError as exc:
                self._drop(copy)
                what = "raise `ulimit -n`" if exc.errno in {errno.EMFILE, errno.ENFILE} else "free some"
                raise NoRoomError(f"{manifest.model}: host memory cannot be taken ({exc.strerror}); {what}") from exc
            self._copies[manifest.key] = copy
            return copy

    def _hidden_name(self) -> str:
        self._serial += 1
        return f".{self._serial}.loading"

    def _go_on(self, part: HostCopy) -> HostCopy:
        try:
            for file in part.files:
                file.remap()
        except OSError as exc:
            raise NoRoomError(f"{part.manifest.model}: host memory cannot be mapped ({exc.strerror}); free some") from exc
        part.state, part.bytes = "loading", part.manifest.bytes
        return part

    def allocate(self, copy: HostCopy, file: int, start: int, end: int) -> None:
        """Makes bytes [start, end) of a file real, so that reading into them can't fail for want of memory.

        Raises:
            NoRoomError: the machine has no memory left.
        """
        try:
            for at in range(start, end, _ALLOCATE_BYTES):
                os.posix_fallocate(copy.files[file].fd, at, min(_ALLOCATE_BYTES, end - at))
        except OSError as exc:
            raise NoRoomError(f"{copy.manifest.model}: host memory ran out ({exc.strerror}); free some") from exc

    def prefault(self, copy: HostCopy, file: int, start: int, end: int) -> None:
        """Maps bytes [start, end) at once where pages are small: a page fault each is what slows readers. Start on a
        page boundary.
        """
        if not self._folder.huge:
            hostfolder.populate(copy.files[file].view, start, end)

    def publish(self, copy: HostCopy) -> None:
        """Locks and seals a copy whose bytes are all verified; from here on it may be seen and is never written.

        Where locking fails, the copy stays unlocked and `lock_warning` says why.
        """
        for file in copy.files:
            if self._locking:
                problem = hostfolder.lock(file.view)
                file.locked = problem is None
                if problem is not None:
                    self.lock_warning = f"weights are not locked in memory: {problem}"
            self._folder.seal(file.fd)
            if not file.locked:
                file.unmap()
        with self._guard:
            name = _copy_name(copy.key)
            self._folder.rename(copy.name, name)
            copy.name = name
            copy.state = "published"

    def descriptors(self, copy: HostCopy) -> list[int]:
        """New read-only descriptors of the files that may be read (`HostCopy.whole_files`), in file order; the caller sends them and closes
        them.

        Raises:
            NoRoomError: the copy just left, or this process may open no more files.
        """
        fds: list[int] = []
        with self._guard:
            if copy.state not in ("published", "part"):
                raise NoRoomError(f"{copy.manifest.model} just left host memory; open it again")
            try:
                for index, file in enumerate(copy.files[: copy.whole_files]):
                    fds.append(self._folder.open_for_client(file.fd, copy.name, _file_name(index)))
            except OSError as exc:
                for fd in fds:
                    os.close(fd)
                raise NoRoomError(f"{copy.manifest.model}: the agent can't open its files ({exc.strerror}); raise `ulimit -n`") from exc
        return fds

    def paths(self, copy: HostCopy) -> list[Path]:
        """Where other programs find the files of a published copy, in file order; none where no path leads to them."""
        folder = self._folder.path
        return [] if folder is None else [folder / copy.name / _file_name(index) for index in range(len(copy.files))]

    def trim(self, copy: HostCopy, keep_bytes: int) -> tuple[int, str]:
        """Gives back all but the first blocks of a copy, of `keep_bytes` at most, where nobody else has any of its files.

        Nobody sees more of it than its whole files before all of it is there again. Returns its bytes; 0 where it can't be done, with the
        reason: the copy is to be evicted then, and may have lost bytes.
        """
        with self._guard:
            if copy.state == "part" and copy.bytes <= keep_bytes:
                return copy.bytes, ""
            kept = copy.whole_blocks(keep_bytes)
            if copy.state not in ("published", "part") or not kept:
                return 0, "less than a block would stay"
            if self._folder.kind == "memfd":
                return 0, "memory files are sealed"
            copy.state = "loading"
            name = self._hidden_name()
            self._folder.rename(copy.name, name)
            copy.name = name
            if not all(file.is_ours_alone() for file in copy.files):
                return 0, "somebody still has it open or mapped"
            before = 0
            for file in copy.files:
                start = max(0, kept - before)
                before += file.entry.bytes
                if start >= file.entry.bytes:
                    continue
                file.unmap()
                problem = hostfolder.punch(file.fd, start, file.entry.bytes)
                if problem is not None or file.allocated_bytes() > start:
                    return 0, problem or "the kernel did not give it back"
            copy.state, copy.bytes, copy.kept_bytes = "part", kept, kept
            return kept, ""

    def evict(self, copy: HostCopy) -> int:
        """Unlinks a copy, also a half-loaded one; returns how many of its bytes the kernel has not given back yet."""
        with self._guard:
            if copy.state == "evicted":
                return copy.bytes if copy in self._lingering else 0
            self._copies.pop(copy.key, None)
            copy.state = "evicted"
            for file in copy.files:
                file.unmap()
            self._folder.remove(copy.name)
            self._lingering.append(copy)
        self.collect()
        return copy.bytes if copy in self._lingering else 0

    def collect(self) -> int:
        """Gives back what nobody maps any more; returns the bytes that still linger."""
        with self._guard:
            for copy in list(self._lingering):
                if not any(f.held_elsewhere() for f in copy.files):
                    self._lingering.remove(copy)
                    self._drop(copy)
            return sum(c.bytes for c in self._lingering)

    def adopt(self, models: Mapping[ModelName, ModelSource]) -> list[HostCopy]:
        """Takes over what a killed agent left, after checking every byte against the manifests; removes the rest."""
        wanted = {_copy_name(s.key): s.manifest for s in models.values()}
        adopted: list[HostCopy] = []
        taken = 0
        for name in self._folder.leftovers():
            manifest = wanted.get(name)
            copy = HostCopy(manifest, [], name) if manifest is not None and taken + manifest.bytes <= self.budget_bytes else None
            if copy is None or not self._reopen(copy):
                self._folder.remove(name)
                continue
            taken += copy.bytes
            self._copies[copy.key] = copy
            self.publish(copy)
            adopted.append(copy)
        return adopted

    def _reopen(self, copy: HostCopy) -> bool:
        try:
            for index, entry in enumerate(copy.manifest.files):
                fd = self._folder.reopen(copy.name, _file_name(index))
                if os.fstat(fd).st_size != entry.bytes:
                    os.close(fd)
                    raise OSError("wrong size")
                file = HostFile(entry, fd, huge_advice=False)
                copy.files.append(file)
                for block, digest in enumerate(entry.blocks):
                    at = block * BLOCK_BYTES
                    if block_digest(file.view[at : at + BLOCK_BYTES]) != digest:
                        raise OSError("wrong bytes")
        except OSError:
            for file in copy.files:
                file.unmap()
            self._drop(copy)
            return False
        return True

    def _drop(self, copy: HostCopy) -> None:
        for file in copy.files:
            file.unmap()
            os.close(file.fd)
        copy.files.clear()
        self._folder.remove(copy.name)

    def close(self) -> None:
        """Evicts everything and removes the folder that it made. Clients keep what they map."""
        for copy in [*self._copies.values()]:
            self.evict(copy)
        with self._guard:
            for copy in self._lingering:
                self._drop(copy)
            self._lingering.clear()
        self._folder.close()
