"""The disk tier's files: which are known to be good, which are quarantined, and descriptors for those who read them
directly.

A file counts as verified while its size, mtime and inode are those at its last hashing (its manifest's or ours); else
it is hashed first. A file that failed is quarantined until it is replaced, which is seen by the same three.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from prefetcher.agent.manifest import BLOCK_BYTES, FileEntry, ModelSource, block_digest, open_weights_file
from prefetcher.errors import IntegrityError

__all__ = ["DiskTier"]

_Stamp = tuple[int, int, int]


def _stamp(fd: int) -> _Stamp:
    found = os.fstat(fd)
    return (found.st_size, found.st_mtime_ns, found.st_ino)


class DiskTier:
    """Safe to call from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._verified: dict[tuple[Path, str], _Stamp] = {}
        self._quarantined: dict[tuple[Path, str], tuple[_Stamp | None, str]] = {}

    def quarantine(self, source: ModelSource, reason: str) -> None:
        """Marks every file of a model as bad until it is replaced."""
        for entry in source.manifest.files:
            try:
                with open_weights_file(source.folder, entry.path, model=source.manifest.model) as fd:
                    stamp: _Stamp | None = _stamp(fd)
            except IntegrityError:
                stamp = None
            with self._guard:
                self._verified.pop((source.folder, entry.path), None)
                self._quarantined[source.folder, entry.path] = (stamp, reason)

    def quarantined(self, source: ModelSource) -> str | None:
        """Why a model is quarantined, or None. It ends for all files when one of them was replaced."""
        for entry in source.manifest.files:
            held = self._quarantined.get((source.folder, entry.path))
            if held is None:
                return None
            try:
                with open_weights_file(source.folder, entry.path, model=source.manifest.model) as fd:
                    now: _Stamp | None = _stamp(fd)
            except IntegrityError:
                now = None
            if now != held[0]:
                with self._guard:
                    for other in source.manifest.files:
                        self._quarantined.pop((source.folder, other.path), None)
                return None
            reason = held[1]
        return reason

    def open_verified(self, source: ModelSource) -> list[int]:
        """Read-only descriptors of a model's disk files in order, hashed first where they are not known to be good.
        Close them.

        Raises:
            IntegrityError: quarantined, missing, or different from the manifest (and quarantined by that).
            ManifestError: a path leads out of the folder.
        """
        model = source.manifest.model
        reason = self.quarantined(source)
        if reason is not None:
            raise IntegrityError(f"{model} is quarantined: {reason}", model=model)
        fds: list[int] = []
        try:
            for entry in source.manifest.files:
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
        known = self._verified.get((source.folder, entry.path), (entry.bytes, entry.mtime_ns, entry.inode))
        if stamp == known:
            return
        where = f"{source.manifest.model}: {source.folder / entry.path}"
        if stamp[0] != entry.bytes:
            raise IntegrityError(f"{where} has {stamp[0]} bytes, the manifest says {entry.bytes}; fetch it again")
        for index, digest in enumerate(entry.blocks):
            block = os.pread(fd, min(BLOCK_BYTES, entry.bytes - index * BLOCK_BYTES), index * BLOCK_BYTES)
            if block_digest(block) != digest:
                raise IntegrityError(f"{where} differs from its manifest in block {index}; fetch it again")
        if _stamp(fd) != stamp:
            raise IntegrityError(f"{where} changed while it was read; try again when it is complete")
        with self._guard:
            self._verified[source.folder, entry.path] = stamp
