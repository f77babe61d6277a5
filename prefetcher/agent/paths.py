"""A path for every model, for engines that read files: links to host memory where a model is there, else to disk.

    FOLDER/MODEL                         -> .versions/MODEL/VERSION of the version that serves
    FOLDER/.versions/MODEL/VERSION/FILE  -> the file in host memory, or on disk

Each link is replaced at once, by a rename, and before the file that it led to leaves: whoever opens one gets a whole file of that version,
whatever is loaded and evicted meanwhile. The way back needs no room: the link to disk is kept beside the one to memory (`.FILE.disk`).
What an engine has open or mapped counts as taken until it lets go (`agent.hostmem`). A model's other files (its configuration, its
tokenizer) are linked to disk, as they are there; pickles, hidden files and manifests are left out. Covers no lease, no parts of models, and
no check of what is read from disk by path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from prefetcher.agent.headers import PICKLE_SUFFIXES
from prefetcher.agent.manifest import MANIFEST_NAME, ModelSource
from prefetcher.core.types import ModelName, WeightsKey
from prefetcher.errors import UsageError
from prefetcher.telemetry.logs import log

__all__ = ["ServedPaths", "lasting"]

_VERSIONS = ".versions"
_LOCK = ".lock"


def lasting(path: str) -> str:
    """The path that follows its model from version to version, where it leads to `path`, one version's folder, now; else `path` itself."""
    version = Path(path)
    of_model = version.parents[2] / version.parent.name
    return str(of_model if of_model.resolve() == version.resolve() else version)


class ServedPaths:
    """The folder of paths of one agent. Safe for threads. Where links can't be made, `problems` says so, and the log once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self._guard = threading.Lock()
        self._lock_fd = -1
        #: The version of each model that is on disk now, and the one that the machine serves.
        self._on_disk: dict[ModelName, ModelSource] = {}
        self._serving: dict[ModelName, WeightsKey] = {}
        #: What is in host memory: its files there, in the order of the manifest.
        self._near: dict[WeightsKey, tuple[ModelSource, Sequence[Path]]] = {}
        #: Versions that have a folder, and when that of their files on disk changed last, as it was linked.
        self._made: dict[WeightsKey, int] = {}
        self._problems: dict[ModelName, str] = {}

    def open(self, models_dir: Path) -> None:
        """Takes the folder, which is made where there is none.

        Raises:
            UsageError: another agent has it, it holds something else, it lies in the models folder or the other way round, or it can't be
                written.
        """
        mine, models = Path(os.path.realpath(self.folder)), Path(os.path.realpath(models_dir))
        if mine.is_relative_to(models) or models.is_relative_to(mine):
            raise UsageError(f"the folder of paths {self.folder} and the models folder {models_dir} lie in each other; name another one")
        lock = self.folder / _VERSIONS / _LOCK
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not lock.exists() and any(self.folder.iterdir()):
                raise UsageError(f"the folder of paths {self.folder} holds something else; name an empty folder, or a new one")
            lock.parent.mkdir(exist_ok=True)
            self._lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self._unlock()
            raise UsageError(f"another agent uses the folder of paths {self.folder}; give this one another") from exc
        except OSError as exc:
            raise UsageError(f"the folder of paths {self.folder} can't be used ({exc.strerror}); name another one") from exc

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """From here on every path leads to disk; the links stay."""
        with self._guard:
            self._near.clear()
            for model in self._on_disk:
                self._settle(model)
            self._unlock()

    def take(self, on_disk: Mapping[ModelName, ModelSource]) -> None:
        """These models are on disk now, and no others. Also makes right what became wrong with links since."""
        with self._guard:
            before, self._on_disk = self._on_disk, dict(on_disk)
            if not before:
                self._forget_leftovers()
            elif not (self.folder / _VERSIONS).is_dir():
                self._made.clear()  # somebody removed it all
            for model in {*before, *on_disk}:
                old, new = before.get(model), on_disk.get(model)
                same = old is not None and new is not None and old.key == new.key and self._made.get(new.key) == _changed_ns(new.folder)
                if not same or model in self._problems:
                    self._settle(model)

    def serve(self, model: ModelName, key: WeightsKey) -> None:
        """This version of a model serves from now on."""
        with self._guard:
            if self._serving.get(model) != key:
                self._serving[model] = key
                self._settle(model)

    def in_host(self, source: ModelSource, files: Sequence[Path]) -> None:
        """All of a model's weights are in host memory, verified."""
        with self._guard:
            self._near[source.key] = (source, files)
            self._settle(source.key.model)

    def leaves_host(self, key: WeightsKey) -> None:
        """A copy in host memory is about to go."""
        with self._guard:
            if self._near.pop(key, None) is not None:
                self._settle(key.model)

    def of(self, key: WeightsKey) -> str:
        """The folder of one version's files, '' where there is none."""
        with self._guard:
            folder = self._folder_of(key)
            return str(folder) if key in self._made and folder.is_dir() else ""

    def problems(self) -> list[str]:
        with self._guard:
            return [f"{model}: no path: {why}" for model, why in sorted(self._problems.items())]

    # --- links; the caller has the lock ---

    def _folder_of(self, key: WeightsKey) -> Path:
        # Versions are any text; a folder's name is not.
        return self.folder / _VERSIONS / key.model / quote(key.version, safe="").replace(".", "%2E")

    def _settle(self, model: ModelName) -> None:
        try:
            self._settle_or_raise(model)
        except OSError as exc:
            why = f"{self.folder}: {exc.strerror}" if exc.errno == errno.ENOSPC else f"{exc.filename or self.folder}: {exc.strerror}"
            if self._problems.get(model) != why:
                log().warning("no_path", model=model, reason=why, then="it is tried again; make room, or move away what lies there")
            self._problems[model] = why
        else:
            self._problems.pop(model, None)

    def _settle_or_raise(self, model: ModelName) -> None:
        on_disk, serving = self._on_disk.get(model), self._serving.get(model)
        near = {key: source for key, (source, _) in self._near.items() if key.model == model}
        wanted = near | ({} if on_disk is None else {on_disk.key: on_disk})
        # What is only on disk may have been replaced there; what is in memory is as it was.
        leads_to = serving if serving in near else on_disk.key if on_disk is not None else None
        for key, source in wanted.items():
            self._link_files(key, source, is_on_disk=on_disk is not None and key == on_disk.key)
        path = self.folder / model
        if leads_to is not None:
            _link(path, os.path.relpath(self._folder_of(leads_to), self.folder))
        elif path.is_symlink():
            path.unlink()
        for key in [key for key in self._made if key.model == model and key not in wanted]:
            _remove_links(self._folder_of(key))
            del self._made[key]
        with contextlib.suppress(OSError):
            (self.folder / _VERSIONS / model).rmdir()  # where it is empty

    def _link_files(self, key: WeightsKey, source: ModelSource, *, is_on_disk: bool) -> None:
        folder, disk = self._folder_of(key), source.folder.absolute()
        changed_ns = _changed_ns(disk)
        near = self._near[key][1] if key in self._near else ()
        failed: OSError | None = None
        for number, entry in enumerate(source.manifest.files):
            path, on_disk = folder / entry.path, str(disk / entry.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                if near:
                    _link(_spare(path), on_disk)
                    _link(path, str(near[number]))
                elif _leads_to(_spare(path), on_disk):
                    _spare(path).rename(path)
                else:
                    _link(path, on_disk)
            except OSError as exc:
                failed = exc  # the others are done all the same: what leaves memory must not be led to
        if failed is not None:
            raise failed
        if is_on_disk and self._made.get(key) != changed_ns:
            others = set(_other_files(disk))
            for gone in folder.rglob("*"):
                name = gone.relative_to(folder).as_posix()
                if gone.is_symlink() and not gone.name.startswith(".") and gone.suffix != ".safetensors" and name not in others:
                    gone.unlink()
            for name in others:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _link(folder / name, str(disk / name))
        self._made[key] = changed_ns if is_on_disk else self._made.get(key, 0)

    def _forget_leftovers(self) -> None:
        """What an agent before this one left of models and versions that are no more."""
        wanted = {self._folder_of(source.key) for source in self._on_disk.values()}
        for model in (self.folder / _VERSIONS).iterdir():
            for version in list(model.iterdir()) if model.is_dir() else []:
                if version not in wanted:
                    _remove_links(version)
            with contextlib.suppress(OSError):
                model.rmdir()
        for path in self.folder.iterdir():
            if path.is_symlink() and path.readlink().parts[:1] == (_VERSIONS,) and path.name not in self._on_disk:
                path.unlink()


def _changed_ns(folder: Path) -> int:
    """When a file came into a model's folder or left it last; 0 where it can't be said."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _other_files(folder: Path) -> list[str]:
    """What lies beside a model's weights and is no weights, no pickle and nothing hidden."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            suffix = Path(name).suffix.lower()
            if not name.startswith(".") and name != MANIFEST_NAME and suffix not in PICKLE_SUFFIXES and suffix != ".safetensors":
                found.append(Path(root, name).relative_to(folder).as_posix())
    return found


def _spare(path: Path) -> Path:
    """Where the link to disk is kept while `path` leads to memory."""
    return path.with_name(f".{path.name}.disk")


def _leads_to(path: Path, target: str) -> bool:
    try:
        return os.readlink(path) == target
    except OSError:
        return False


def _link(path: Path, target: str) -> None:
    """Makes `path` a link to `target`, at once if it was one to something else. Raises OSError, also where something else lies there."""
    if _leads_to(path, target):
        return
    if os.path.lexists(path) and not path.is_symlink():
        raise FileExistsError(errno.EEXIST, "something else lies there", str(path))
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(target)
    new.rename(path)


def _remove_links(folder: Path) -> None:
    """Removes the links in a folder, and folders that are empty then. What else lies there stays."""
    for root, folders, names in os.walk(folder, topdown=False):
        for name in (*names, *folders):
            path = Path(root, name)
            with contextlib.suppress(OSError):
                path.unlink() if path.is_symlink() else path.rmdir() if path.is_dir() else None
    with contextlib.suppress(OSError):
        folder.rmdir()
