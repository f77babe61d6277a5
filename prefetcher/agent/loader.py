"""Moves one model from disk into host memory: several threads, whole blocks, every block verified as it arrives.

Covers reading, digests, pausing, cancelling and the rate cap. Taking and publishing the memory is `hostmem`'s work;
which load runs when is the residency machine's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prefetcher.agent.files import BLOCK_BYTES, block_digest, open_weights_file
from prefetcher.agent.hostmem import HostArena, HostCopy
from prefetcher.agent.manifest import Manifest
from prefetcher.clock import Clock
from prefetcher.errors import IntegrityError, PrefetcherError

__all__ = ["PAUSE_BYTES", "THREADS", "LoadCancelledError", "LoadControl", "LoadResult", "load"]

#: A load that is told to pause stops at the next multiple of this, as the replay's links do.
PAUSE_BYTES = 64 << 20

#: Measured on two cores: 2 threads leave the disk idle while they hash; 4 keep it busy as long as nothing else runs, 8 also beside four
#: busy processes (1.05 of `cat`'s time against 1.28).
THREADS = 8


class LoadCancelledError(PrefetcherError):
    """The load was told to stop; the caller gives its memory back."""


class LoadControl:
    """Pauses, resumes, slows and cancels a load from another thread.

    `rate_bytes_per_s` caps what is read, in the machine's seconds; None reads as fast as the disk gives. What is left of a block until a
    pause takes hold is not capped. Time that was paused earns no burst.
    """

    def __init__(self, rate_bytes_per_s: float | None = None) -> None:
        self.changed = threading.Condition()
        self.paused = False
        #: Whether it was told that this pause has taken hold.
        self.paused_told = False
        self.cancelled = False
        self.rate_bytes_per_s = rate_bytes_per_s
        #: Ends the waits of a slowed load; replaced when it was used.
        self.nudge = threading.Event()

    def pause(self) -> None:
        with self.changed:
            self.paused = True
            self._tell()

    def resume(self) -> None:
        with self.changed:
            # Also where the next pause comes before a byte was read: it is told of that one as well.
            self.paused = self.paused_told = False
            self._tell()

    def cancel(self) -> None:
        with self.changed:
            self.cancelled = True
            self._tell()

    def limit(self, rate_bytes_per_s: float | None) -> None:
        """From now on another cap, or none."""
        with self.changed:
            self.rate_bytes_per_s = rate_bytes_per_s
            self._tell()

    def _tell(self) -> None:
        self.nudge.set()
        self.nudge = threading.Event()
        self.changed.notify_all()


#: O_DIRECT wants memory, places and lengths in multiples of this on any disk that is sold.
_SECTOR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a complete load took: bytes, seconds from start to end, and whether the page cache was passed by."""

    bytes: int
    seconds: float
    direct: bool


@dataclass(frozen=True, slots=True)
class _Block:
    file: int
    index: int
    start: int
    end: int
    #: Bytes of the model before this block.
    before: int


class _Run:
    """One load: hands blocks to its threads in file order."""

    def __init__(
        self,
        manifest: Manifest,
        arena: HostArena,
        target: HostCopy,
        control: LoadControl,
        on_block: Callable[[int, int, int], None] | None,
        on_paused: Callable[[int], None] | None,
        clock: Clock,
    ) -> None:
        self.manifest, self.arena, self.target, self.control = manifest, arena, target, control
        self.on_block, self.on_paused, self.clock = on_block, on_paused, clock
        self.started_s = clock.steady_s()
        self.error: BaseException | None = None
        self.next = 0
        self.running = 0
        self.done_bytes = 0
        #: When the cap lets the next block begin.
        self.free_at_s = self.started_s
        self.blocks: list[_Block] = []
        before = 0
        for number, entry in enumerate(manifest.files):
            for index in range(len(entry.blocks)):
                start = index * BLOCK_BYTES
                end = min(entry.bytes, start + BLOCK_BYTES)
                self.blocks.append(_Block(number, index, start, end, before))
                before += end - start
        # Of a part the first blocks are there, and were verified when they were read.
        while self.next < len(self.blocks) and self.blocks[self.next].before < target.kept_bytes:
            self.done_bytes += self.blocks[self.next].end - self.blocks[self.next].start
            self.next += 1

    def take(self) -> _Block | None:
        """The next block, once it may be read; None when there is none or the load ends."""
        while True:
            with self.control.changed:
                block = self._next()
                if block is None:
                    return None
                # What is told to pause has somebody waiting for the end of its block.
                rate = None if self.control.paused else self.control.rate_bytes_per_s
                nudge = self.control.nudge
                now_s = self.clock.steady_s()
                if rate is None or self.free_at_s <= now_s:
                    self.next += 1
                    self.running += 1
                    if rate is not None:
                        self.free_at_s = now_s + (block.end - block.start) / rate * self.clock.speed
                    return block
                left_s = self.free_at_s - now_s
            self.clock.wait(nudge, left_s)

    def _next(self) -> _Block | None:
        """The block that is next, after any pause. The caller has the lock, and takes it or not."""
        while True:
            if self.error is not None or self.next >= len(self.blocks):
                return None
            if self.control.cancelled:
                self.fail(LoadCancelledError(f"the load of {self.manifest.model} was cancelled"))
                return None
            block = self.blocks[self.next]
            boundary = self.next == 0 or block.before // PAUSE_BYTES != self.blocks[self.next - 1].before // PAUSE_BYTES
            if not (self.control.paused and boundary):
                return block
            if self.running == 0 and not self.control.paused_told:
                self.control.paused_told = True
                if self.on_paused:
                    self.on_paused(self.done_bytes)
            self.control.changed.wait()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    def finished(self, block: _Block) -> None:
        with self.control.changed:
            self.running -= 1
            self.done_bytes += block.end - block.start
            done = self.done_bytes
            self.control.changed.notify_all()
            if self.on_block:
                self.on_block(block.file, block.index, done)

    def work(self, fds: list[tuple[int, bool]]) -> None:
        try:
            while (block := self.take()) is not None:
                self.read(block, *fds[block.file])
                self.finished(block)
        except Exception as exc:  # noqa: BLE001 - handed to the thread that called load
            with self.control.changed:
                self.fail(exc)
                self.control.changed.notify_all()

    def read(self, block: _Block, fd: int, direct: bool) -> None:
        entry = self.manifest.files[block.file]
        model, where = self.manifest.model, f"{self.manifest.model}: {entry.path}"
        self.arena.allocate(self.target, block.file, block.start, block.end)
        self.arena.prefault(self.target, block.file, block.start, block.end)
        # Released at the end whatever happens: an error's traceback would keep the slice, and with it the mapping, from being closed.
        with self.target.files[block.file].view[block.start : block.end] as view:
            try:
                done = _fill(fd, view, block.start, direct)
            except OSError as exc:
                raise IntegrityError(
                    f"{where} cannot be read ({exc.strerror}); fetch it again, or look after the disk", model=model
                ) from exc
            if done != len(view):
                raise IntegrityError(f"{where} ends at {block.start + done} bytes, expected {entry.bytes}; fetch it again", model=model)
            if block_digest(view) != entry.blocks[block.index]:
                raise IntegrityError(
                    f"{where} differs from its manifest in bytes {block.start} to {block.end}; fetch it again", model=model
                )
        if not direct:
            os.posix_fadvise(fd, block.start, block.end - block.start, os.POSIX_FADV_DONTNEED)


def _fill(fd: int, view: memoryview, offset: int, direct: bool) -> int:
    """Reads until `view` is full or the file ends; returns the bytes read."""
    done = 0
    aligned = len(view) // _SECTOR_BYTES * _SECTOR_BYTES if direct else len(view)
    while done < aligned:
        with view[done:aligned] as rest:
            count = os.preadv(fd, [rest], offset + done)
        if count == 0:
            return done
        done += count
        if direct and done % _SECTOR_BYTES:
            return done  # the file ends here, earlier than it should
    if done < len(view):
        # The odd end of a file: O_DIRECT reads whole sectors only, so it passes through a page of its own.
        with mmap.mmap(-1, _SECTOR_BYTES) as page:
            count = os.preadv(fd, [page], offset + done)
            count = min(count, len(view) - done)
            view[done : done + count] = page[:count]
            done += count
    return done


@contextlib.contextmanager
def _sources(manifest: Manifest, folder: Path) -> Iterator[list[tuple[int, bool]]]:
    """Descriptors of the files, each with whether it passes the page cache by."""
    with contextlib.ExitStack() as stack:
        fds: list[tuple[int, bool]] = []
        for entry in manifest.files:
            try:
                fd = stack.enter_context(open_weights_file(folder, entry.path, model=manifest.model, direct=True))
                direct = _reads_directly(fd)
            except OSError:
                fd, direct = stack.enter_context(open_weights_file(folder, entry.path, model=manifest.model)), False
            size = os.fstat(fd).st_size
            if size != entry.bytes:
                raise IntegrityError(
                    f"{manifest.model}: {entry.path} has {size} bytes, the manifest says {entry.bytes}; fetch it again",
                    model=manifest.model,
                )
            fds.append((fd, direct))
        yield fds


def _reads_directly(fd: int) -> bool:
    """Whether O_DIRECT works on this file; where it doesn't, it is taken off. Some filesystems take the flag and then refuse 4 KiB."""
    with mmap.mmap(-1, _SECTOR_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                return True  # a bad place on the disk: said where the file is read
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return False
    return True


def load(
    manifest: Manifest,
    source_folder: Path,
    arena: HostArena,
    target: HostCopy,
    *,
    clock: Clock,
    on_block: Callable[[int, int, int], None] | None = None,
    on_paused: Callable[[int], None] | None = None,
    control: LoadControl | None = None,
    threads: int = THREADS,
) -> LoadResult:
    """Fills `target` (from `arena.begin`) and returns when every byte is there and verified; publishing is left to the
    caller. What a part kept is not read again.

    `on_block(file, block, verified_bytes)` is told each verified block; blocks may come out of order.
    `on_paused(verified_bytes)` is told when a pause has taken hold: nothing is being read. Both are called from the
    load's threads and must not wait. On any error the caller gives the memory back with `arena.evict(target)`.

    Raises:
        IntegrityError: a file is missing, short or differs from the manifest.
        ManifestError: a path leads out of the folder.
        NoRoomError: the machine's memory ran out.
        LoadCancelledError: `control.cancel()` was called.
    """
    run = _Run(manifest, arena, target, control or LoadControl(), on_block, on_paused, clock)
    with _sources(manifest, source_folder) as fds:
        workers = [
            threading.Thread(target=run.work, args=(fds,), name=f"load-{i}", daemon=True)
            for i in range(max(1, min(threads, len(run.blocks))))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        direct = all(d for _, d in fds)
    if run.error is not None:
        raise run.error
    return LoadResult(run.done_bytes, clock.steady_s() - run.started_s, direct)
