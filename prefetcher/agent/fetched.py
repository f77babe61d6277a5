"""Where fetched models lie: a hidden folder of the models folder that is the agent's own, and a link by each model's name.

    models/.prefetcher/MODEL/VERSION/        a complete model, never changed
    models/.prefetcher/MODEL/.part-VERSION/  what is there of one that is not complete; nobody looks into it
    models/MODEL -> .prefetcher/MODEL/VERSION

A model becomes visible by one rename and leaves by one. What people put into the models folder is never touched: a folder of theirs by a
model's name stands in place of the link. Covers no transfers; when what is removed, the residency machine says.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from prefetcher.agent.files import write_whole
from prefetcher.agent.manifest import FETCHED_NAME, MANIFEST_NAME, Manifest, ModelSource, read_manifest
from prefetcher.core.types import WeightsKey
from prefetcher.errors import ManifestError, PrefetcherError, UsageError
from prefetcher.telemetry.logs import log

__all__ = ["FetchedFolder"]

_PART, _GONE = ".part-", ".gone-"
#: What a file system takes as a name.
_NAME_BYTES = 240


class FetchedFolder:
    """The fetched models under `models_dir`, for one process at a time. Safe for threads that work on different models."""

    def __init__(self, models_dir: Path) -> None:
        self._models = models_dir
        self.place = str(models_dir)
        self._root = models_dir / FETCHED_NAME
        self._lock: int | None = None
        #: Goes up with everything that appears or leaves, so that a look that began before is known to be old.
        self.changes = 0
        self._guard = threading.Lock()

    def open(self, keep: Iterable[WeightsKey] | None) -> None:
        """Takes the folder and tidies up after whoever was killed: parts of what is not in `keep` go (None: all stay).

        Raises:
            UsageError: another agent has it, or it can't be written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self.close()
            raise UsageError(f"another agent fetches into {self._models}; give this one a models folder of its own with --models") from exc
        except OSError as exc:
            self.close()
            raise UsageError(f"{self._root} can't be written ({exc.strerror}); fetching models needs a folder of them to write to") from exc
        wanted = None if keep is None else {self._part(key) for key in keep}
        for path in self._root.glob("*/.*"):
            if path.name.startswith(_GONE) or (path.name.startswith(_PART) and wanted is not None and path not in wanted):
                shutil.rmtree(path, ignore_errors=True)
        for source in self.scan().values():
            self._link(source.key)
        self._unlink_dangling()

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    # --- what is there ---

    def scan(self) -> dict[WeightsKey, ModelSource]:
        """Every complete model. One that is not what its manifest says is removed: nobody put it there by hand."""
        found: dict[WeightsKey, ModelSource] = {}
        for folder in sorted(self._root.glob("*/[!.]*")):
            try:
                manifest = read_manifest(folder)
            except PrefetcherError as exc:
                if not folder.is_dir():
                    continue  # it leaves just now
                log().warning("fetched_model_removed", folder=str(folder), reason=str(exc), then="it is fetched again when it is wanted")
                self._discard(folder)
                continue
            if folder == self._folder(manifest.key):
                found[manifest.key] = ModelSource(manifest, folder)
        return found

    def is_inside(self, folder: Path) -> bool:
        """Whether a model's folder is one of those here."""
        return folder.is_relative_to(self._root)

    def parts_bytes(self, but: Iterable[WeightsKey]) -> int:
        """What parts take on the disk, those of `but` left out."""
        left_out = {self._part(key) for key in but}
        return sum(_taken(part) for part in self._parts() if part not in left_out)

    def drop_parts(self, but: WeightsKey, wanted_bytes: int) -> int:
        """Removes parts of others, oldest first, until so many bytes are free of them; how many are."""
        freed = 0
        for part in sorted(self._parts(), key=lambda path: path.stat().st_mtime):
            if freed >= wanted_bytes:
                break
            if part != self._part(but):
                freed += _taken(part)
                shutil.rmtree(part, ignore_errors=True)
        return freed

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        stat = os.statvfs(self._root)
        return stat.f_bavail * stat.f_frsize

    # --- coming and going ---

    def part(self, key: WeightsKey) -> Path:
        """The folder to fetch into, with what is there already.

        Raises:
            ManifestError: the model's name is longer than a folder's may be.
        """
        part = self._part(key)
        if max(len(part.name), len(part.parent.name)) > _NAME_BYTES:
            raise ManifestError(f"model {key.model[:80]!r}: its name or version is too long for a folder; publish it by a shorter one")
        part.mkdir(parents=True, exist_ok=True)
        return part

    def publish(self, key: WeightsKey, manifest: Manifest) -> ModelSource:
        """Makes a part that is complete and durable visible, in one step."""
        part, folder = self._part(key), self._folder(key)
        files = []
        for entry in manifest.files:
            status = (part / entry.path).stat()
            files.append(msgspec.structs.replace(entry, mtime_ns=status.st_mtime_ns, inode=status.st_ino))
        local = msgspec.structs.replace(manifest, files=tuple(files))
        write_whole(part / MANIFEST_NAME, msgspec.json.encode(local))
        for inside in {(part / entry.path).parent for entry in manifest.files}:
            _sync(inside)
        if folder.exists():
            self._discard(folder)
        part.rename(folder)
        _sync(folder.parent)
        _sync(self._root)
        with self._guard:
            self.changes += 1
        self._link(key)
        return ModelSource(local, folder)

    def remove(self, key: WeightsKey) -> None:
        """Gives the disk back: a complete model, and what there is of a part."""
        with self._guard:
            self.changes += 1
        link = self._models / key.model
        with contextlib.suppress(OSError):
            if self._is_ours(link) and link.readlink() == self._target(key):
                link.unlink()
        for folder in (self._folder(key), self._part(key)):
            if folder.exists():
                self._discard(folder)
        with contextlib.suppress(OSError):
            self._folder(key).parent.rmdir()

    def _discard(self, folder: Path) -> None:
        """Out of sight at once, then file by file. What can't be removed is said, and tried again at the next start."""
        gone = folder.with_name(f"{_GONE}{folder.name.lstrip('.')}-{self.changes}")
        try:
            folder.rename(gone)
            shutil.rmtree(gone)
        except OSError as exc:
            log().error("fetched_model_stays", folder=str(folder), reason=str(exc), then="remove it by hand")

    # --- names ---

    def _folder(self, key: WeightsKey) -> Path:
        return self._root / _quoted(key.model) / _quoted(key.version)

    def _part(self, key: WeightsKey) -> Path:
        return self._root / _quoted(key.model) / f"{_PART}{_quoted(key.version)}"

    def _parts(self) -> list[Path]:
        return [path for path in self._root.glob(f"*/{_PART}*") if path.is_dir()]

    def _target(self, key: WeightsKey) -> Path:
        return self._folder(key).relative_to(self._models)

    def _is_ours(self, link: Path) -> bool:
        return link.is_symlink() and link.readlink().parts[:1] == (FETCHED_NAME,)

    def _link(self, key: WeightsKey) -> None:
        """Leads the model's name to this version, unless people have something by that name."""
        link = self._models / key.model
        if os.path.lexists(link) and not self._is_ours(link):
            return
        beside = self._root / f".link-{_quoted(key.model)}"
        try:
            beside.unlink(missing_ok=True)
            beside.symlink_to(self._target(key))
            beside.rename(link)
        except OSError as exc:
            log().warning("model_not_linked", model=key.model, reason=str(exc), then="programs open it by its name all the same")

    def _unlink_dangling(self) -> None:
        for link in self._models.iterdir():
            if self._is_ours(link) and not link.exists():
                link.unlink(missing_ok=True)


def _quoted(name: str) -> str:
    """A name as a folder that is not hidden."""
    quoted = quote(name, safe=" @+=,")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def _taken(folder: Path) -> int:
    taken = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                taken += os.lstat(os.path.join(root, name)).st_blocks * 512
    return taken


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
