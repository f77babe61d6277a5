"""Fetches one model from a store into a folder of parts: several ranges at a time, every block checked as it is written.

Covers what a part has already (checked, not believed), waiting as the store asks, the rate cap, pausing and cancelling. Which model is
fetched when, and what becomes of the folder, is `fetching`'s; where folders are, `fetched`'s.

The digests that are checked are those of the manifest's 16 MiB blocks, each as it comes and by whoever fetched it: a digest of the whole
file would need one thread to see all of it in order, at a tenth of the speed, and would say nothing more, since it stands in the same
manifest.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prefetcher.agent.files import BLOCK_BYTES, block_digest, read_block
from prefetcher.agent.loader import LoadCancelledError, LoadControl
from prefetcher.agent.manifest import FileEntry, Manifest
from prefetcher.clock import Clock
from prefetcher.errors import ChangedError, IntegrityError, NoRoomError, RateLimitedError, TemporaryError, UnavailableError
from prefetcher.ports import StoredObject, WeightsStore

__all__ = ["STREAMS", "Fetch", "FetchPausedError", "FetchResult"]

#: Eight requests of some megabytes keep a link of 10 Gbit/s busy over a round trip of several milliseconds.
STREAMS = 8
#: Real seconds: the first wait after a failure, and the longest without the store's asking for more.
_BACK_OFF_S, _BACK_OFF_CAP_S = 0.25, 20.0


class FetchPausedError(Exception):
    """The fetch stands still, as it was told; it goes on from what is in its folder."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a complete fetch took: bytes from the store, bytes that an earlier one had left, tries that failed."""

    fetched_bytes: int
    kept_bytes: int
    failures: int


#: A file's descriptor, and one that passes the page cache by, where there is one.
_Target = tuple[int, int | None]
#: O_DIRECT wants memory, places and lengths in multiples of this on any disk that is sold.
_SECTOR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Block:
    file: int
    index: int
    start: int
    end: int


class Fetch:
    """One fetch of `manifest` into `folder`, for one `run`. `objects` are its files in the store by their path in the manifest.

    `on_progress(verified_bytes)` is told after each block, by threads of the fetch, and must not wait; `on_wait(reason)` of each try that
    failed. A fetch of which no byte came for `deadline_s` (real seconds) ends. `verified` are blocks (file, index) that this process wrote
    before, and are added to; what else lies in the folder is checked first.
    """

    def __init__(
        self,
        manifest: Manifest,
        objects: Mapping[str, StoredObject],
        store: WeightsStore,
        folder: Path,
        control: LoadControl,
        clock: Clock,
        *,
        on_progress: Callable[[int], None] = lambda done: None,
        on_wait: Callable[[str], None] = lambda reason: None,
        streams: int = STREAMS,
        deadline_s: float = 60.0,
        verified: set[tuple[int, int]] | None = None,
    ) -> None:
        self.manifest, self.objects, self.store, self.folder = manifest, objects, store, folder
        self.control, self.clock, self.on_progress, self.on_wait = control, clock, on_progress, on_wait
        self.streams, self.deadline_s = streams, deadline_s
        self.verified = set() if verified is None else verified
        self.error: BaseException | None = None
        self.done_bytes = self.fetched_bytes = self.failures = 0
        self._next = 0
        self._blocks = [
            _Block(number, index, index * BLOCK_BYTES, min(entry.bytes, (index + 1) * BLOCK_BYTES))
            for number, entry in enumerate(manifest.files)
            for index in range(len(entry.blocks))
        ]
        #: Files of which an earlier fetch may have left something.
        self._old: set[int] = set()
        self._random = random.Random()
        self._row = 0
        self._came_s = self._free_at_s = self._held_until_s = self._real_s()

    def run(self) -> FetchResult:
        """Returns when every byte is in the folder, verified and durable.

        Raises:
            FetchPausedError, LoadCancelledError: `control` said so; what is there stays.
            IntegrityError: the store's bytes are not those of the manifest, twice.
            ChangedError: the store's files were replaced meanwhile.
            RateLimitedError, UnavailableError: the store gave nothing for `deadline_s`, or asks to wait for longer.
            UsageError: the store refuses this program.
            NoRoomError: the disk is full.
        """
        with self._targets() as fds:
            workers = [
                threading.Thread(target=self._work, args=(fds,), name=f"fetch-{i}", daemon=True)
                for i in range(max(1, min(self.streams, len(self._blocks))))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if self.error is not None:
                raise self.error
            for fd, _ in fds:
                try:
                    os.fsync(fd)
                except OSError as exc:
                    raise _no_room(self.folder, exc) from exc
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return FetchResult(self.fetched_bytes, self.done_bytes - self.fetched_bytes, self.failures)

    @contextlib.contextmanager
    def _targets(self) -> Iterator[list[_Target]]:
        """The files, of their whole length: a disk that is too small says so before anything is fetched."""
        fds: list[_Target] = []
        try:
            for number, entry in enumerate(self.manifest.files):
                path = self.folder / entry.path
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                fds.append((fd, _direct(path)))
                if os.fstat(fd).st_size:
                    self._old.add(number)
                os.ftruncate(fd, entry.bytes)
                os.posix_fallocate(fd, 0, entry.bytes)
            yield fds
        except OSError as exc:
            raise _no_room(self.folder, exc) from exc
        finally:
            for fd, direct in fds:
                os.close(fd)
                if direct is not None:
                    os.close(direct)

    def _real_s(self) -> float:
        return self.clock.steady_s() / self.clock.speed

    # --- threads ---

    def _work(self, fds: list[_Target]) -> None:
        try:
            # Anonymous memory begins at a page, as O_DIRECT wants it; a traceback would keep what is not released from being closed.
            with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as buffer:
                memory.madvise(mmap.MADV_HUGEPAGE)
                while (block := self._take()) is not None:
                    with buffer[: block.end - block.start] as view:
                        came = self._one(block, fds[block.file], view)
                    with self.control.changed:
                        self.done_bytes += block.end - block.start
                        self.fetched_bytes += came
                        done = self.done_bytes
                    self.on_progress(done)
        except Exception as exc:  # noqa: BLE001 - handed to the thread that called run
            with self.control.changed:
                self.error = self.error or exc
                # Whoever waits for the cap or for the store waits for nothing any more.
                self.control.limit(self.control.rate_bytes_per_s)

    def _stopped(self) -> BaseException | None:
        """Why no more is to be read; the caller has the lock."""
        if self.control.cancelled:
            return LoadCancelledError(f"the fetch of {self.manifest.model} was cancelled")
        return FetchPausedError() if self.control.paused else None

    def _take(self) -> _Block | None:
        """The next block; None when there is none or the fetch ends."""
        with self.control.changed:
            if self._next >= len(self._blocks) or self.error is not None:
                return None
            if (why := self._stopped()) is not None:
                raise why
            self._next += 1
            return self._blocks[self._next - 1]

    def _turn(self, count: int) -> None:
        """Waits until the cap and the store let `count` bytes be asked for. Raises what ends the fetch meanwhile."""
        while True:
            with self.control.changed:
                if (why := self.error or self._stopped()) is not None:
                    raise why
                rate, nudge, now_s = self.control.rate_bytes_per_s, self.control.nudge, self._real_s()
                free_s = max(self._held_until_s, self._free_at_s if rate is not None else 0.0)
                if free_s <= now_s:
                    if rate is not None:
                        # Time without a request earns no burst.
                        self._free_at_s = now_s + count / rate
                    return
            self.clock.wait(nudge, (free_s - now_s) * self.clock.speed)

    def _one(self, block: _Block, target: _Target, view: memoryview) -> int:
        """Makes a block's bytes right on disk; how many of them were fetched."""
        entry = self.manifest.files[block.file]
        digest, where = entry.blocks[block.index], f"{self.manifest.model}: {entry.path}"
        if (block.file, block.index) in self.verified:
            return 0
        if block.file in self._old:
            # What can't be read here is fetched as what differs is.
            with contextlib.suppress(IntegrityError):
                read_block(target[0], view, block.start, what=where)
                if block_digest(view) == digest:
                    self.verified.add((block.file, block.index))
                    return 0
        for again in (True, False):
            self._read(entry, block, view)
            if block_digest(view) == digest:
                break
            if not again:
                raise IntegrityError(
                    f"{where} in {self.store.place} differs from its manifest in bytes {block.start} to {block.end}; publish it again",
                    model=self.manifest.model,
                )
        try:
            _write(target, view, block.start)
        except OSError as exc:
            raise _no_room(self.folder, exc) from exc
        self.verified.add((block.file, block.index))
        return len(view)

    def _read(self, entry: FileEntry, block: _Block, view: memoryview) -> None:
        found = self.objects[entry.path]
        while True:
            self._turn(len(view))
            try:
                count = self.store.read_range(found, block.start, view, self._goes_on)
            except ChangedError:
                raise
            except TemporaryError as exc:
                self._wait_after(exc)
                continue
            with self.control.changed:
                if (why := self.error or self._stopped()) is not None:
                    raise why
                self._came_s, self._row = self._real_s(), 0
            if count == len(view):
                return
            raise IntegrityError(
                f"{self.manifest.model}: {entry.path} in {self.store.place} ends at {block.start + count} bytes, the manifest says "
                f"{entry.bytes}; publish it again",
                model=self.manifest.model,
            )

    def _goes_on(self) -> bool:
        self._came_s = self._real_s()
        return self.error is None and not self.control.cancelled and not self.control.paused

    def _wait_after(self, exc: TemporaryError) -> None:
        """Nothing is asked for as long as the store says, else twice as long as after the failure before. Raises what ends the fetch."""
        busy = isinstance(exc, RateLimitedError)
        self.on_wait("busy" if busy else "away")
        with self.control.changed:
            self.failures += 1
            self._row += 1
            # Eight threads fail at once: they are one failure.
            doubled = _BACK_OFF_S * 2.0 ** min((self._row - 1) // self.streams, 20)
            wait_s = max(exc.retry_after_s, min(doubled, _BACK_OFF_CAP_S) * (0.5 + 0.5 * self._random.random()))
            now_s = self._real_s()
            if now_s + wait_s > self._came_s + self.deadline_s:
                kind = RateLimitedError if busy else UnavailableError
                raise kind(
                    f"{self.manifest.model}: {self.store.place} gave nothing for {now_s - self._came_s:.0f} s: {exc}",
                    retry_after_s=exc.retry_after_s,
                ) from exc
            self._held_until_s = max(self._held_until_s, now_s + wait_s)


def _direct(path: Path) -> int | None:
    """A descriptor that passes the page cache by, None where the file system has none: half of what a fetch costs is copying into it."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _write(target: _Target, view: memoryview, start: int) -> None:
    """Writes all of `view`, whole sectors directly."""
    fd, direct = target
    done, aligned = 0, len(view) // _SECTOR_BYTES * _SECTOR_BYTES
    while direct is not None and done < aligned:
        try:
            with view[done:aligned] as rest:
                done += os.pwrite(direct, rest, start + done)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            break  # some file systems take the flag and refuse the write
        if done % _SECTOR_BYTES:
            break
    while done < len(view):
        with view[done:] as rest:
            done += os.pwrite(fd, rest, start + done)


def _no_room(folder: Path, exc: OSError) -> NoRoomError:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoomError(f"{folder}: the disk is full; make room, or lower PREFETCHER_STORE__DISK_BYTES", retry_after_s=10.0)
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return NoRoomError(f"{folder}: too many open files; raise `ulimit -n`")
    return NoRoomError(f"{folder} can't be written ({exc.strerror}); look after the disk", retry_after_s=10.0)
