"""The disk tier's files: which are known to be good, which are quarantined, and descriptors for those who read them directly.

A file counts as verified while its size, mtime and inode are those at its last hashing (its manifest's or ours); else it is hashed first. A
file that failed is quarantined until it is replaced, which is seen by the same three. The quarantine is kept in a file of its own, so that
a restart does not read bad files again; never in the models folder, which may be read-only or shared.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from prefetcher.agent.files import BLOCK_BYTES, block_digest, open_weights_file, read_block, write_whole
from prefetcher.agent.manifest import FileEntry, ModelSource
from prefetcher.errors import IntegrityError
from prefetcher.telemetry.logs import log

__all__ = ["DiskTier"]

#: Size, mtime in ns and inode; None where the file can't be opened.
_Stamp = tuple[int, int, int] | None


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A quarantined file: the model's folder, the path in it, the digest that it should have, what it was like then, and why."""

    folder: str
    path: str
    sha256: str
    stamp: _Stamp
    reason: str


def _stamp(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return (found.st_size, found.st_mtime_ns, found.st_ino)


def _stamp_of(source: ModelSource, entry: FileEntry) -> _Stamp:
    try:
        with open_weights_file(source.folder, entry.path, model=source.manifest.model) as fd:
            return _stamp(fd)
    except IntegrityError:
        return None


class DiskTier:
    """Safe to call from several threads. `kept_in` is the quarantine's file; without one it lasts as long as this object."""

    def __init__(self, kept_in: Path | None = None) -> None:
        self._guard = threading.Lock()
        self._kept_in = kept_in
        self._verified: dict[tuple[str, str], _Stamp] = {}
        self._quarantined: dict[tuple[str, str], _Held] = {}
        if kept_in is not None:
            self._read(kept_in)

    def _read(self, path: Path) -> None:
        try:
            held = msgspec.json.decode(path.read_bytes(), type=list[_Held])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as exc:
            log().warning("quarantine_unreadable", path=str(path), reason=str(exc), then="bad files are found again when they are read")
            return
        self._quarantined = {(h.folder, h.path): h for h in held}

    def _keep(self) -> None:
        """Writes the quarantine down; the caller has the lock."""
        if self._kept_in is None:
            return
        try:
            self._kept_in.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._kept_in, msgspec.json.encode(sorted(self._quarantined.values(), key=lambda h: (h.folder, h.path))))
        except OSError as exc:
            log().warning("quarantine_not_kept", path=str(self._kept_in), reason=str(exc), then="it ends with this process")

    def quarantine(self, source: ModelSource, reason: str) -> None:
        """Marks every file of a model as bad until it is replaced."""
        folder = str(source.folder.absolute())
        held = [_Held(folder, entry.path, entry.sha256, _stamp_of(source, entry), reason) for entry in source.manifest.files]
        with self._guard:
            for one in held:
                self._verified.pop((one.folder, one.path), None)
                self._quarantined[one.folder, one.path] = one
            self._keep()

    def quarantined(self, source: ModelSource) -> str | None:
        """Why a model is quarantined, or None. It ends for all files when one of them was replaced or the manifest says other digests."""
        folder = str(source.folder.absolute())
        held = [self._quarantined.get((folder, entry.path)) for entry in source.manifest.files]
        if not any(held):
            return None
        reason = None
        for one, entry in zip(held, source.manifest.files, strict=True):
            if one is None or one.sha256 != entry.sha256 or one.stamp != _stamp_of(source, entry):
                break
            reason = one.reason
        else:
            return reason
        with self._guard:
            for entry in source.manifest.files:
                self._quarantined.pop((folder, entry.path), None)
            self._keep()
        return None

    def open_verified(self, source: ModelSource, first: int = 0) -> list[int]:
        """Read-only descriptors of a model's disk files in order, from number `first` on, hashed first where they are not known to be good.
        Close them.

        Raises:
            IntegrityError: quarantined, missing, or different from the manifest (and quarantined by that).
            ManifestError: a path leads out of the folder.
            NoRoomError: this process may open no more files.
        """
        model = source.manifest.model
        reason = self.quarantined(source)
        if reason is not None:
            raise IntegrityError(f"{model} is quarantined: {reason}", model=model)
        fds: list[int] = []
        try:
            for entry in source.manifest.files[first:]:
                with open_weights_file(source.folder, entry.path, model=model) as fd:
                    self._verify(source, entry, fd)
                    fds.append(os.dup(fd))
        except BaseException as exc:
            for fd in fds:
                os.close(fd)
            if isinstance(exc, IntegrityError):
                self.quarantine(source, str(exc))
            raise
        return fds

    def _verify(self, source: ModelSource, entry: FileEntry, fd: int) -> None:
        stamp = _stamp(fd)
        name = (str(source.folder.absolute()), entry.path)
        if stamp == self._verified.get(name, (entry.bytes, entry.mtime_ns, entry.inode)):
            return
        where = f"{source.manifest.model}: {source.folder / entry.path}"
        if stamp[0] != entry.bytes:
            raise IntegrityError(f"{where} has {stamp[0]} bytes, the manifest says {entry.bytes}; fetch it again")
        buffer = memoryview(bytearray(min(BLOCK_BYTES, entry.bytes)))
        for index, digest in enumerate(entry.blocks):
            block = buffer[: min(BLOCK_BYTES, entry.bytes - index * BLOCK_BYTES)]
            read_block(fd, block, index * BLOCK_BYTES, what=where)
            if block_digest(block) != digest:
                raise IntegrityError(f"{where} differs from its manifest in block {index}; fetch it again")
        if _stamp(fd) != stamp:
            raise IntegrityError(f"{where} changed while it was read; try again when it is complete")
        with self._guard:
            self._verified[name] = stamp
