"""A path for every model, for engines that read files: links to host memory where a file is there, else to disk.

    FOLDER/MODEL                         -> .versions/MODEL/VERSION of the version that serves
    FOLDER/.versions/MODEL/VERSION/FILE  -> the file in host memory, or on disk

Each link is replaced at once, by a rename, and before the file that it led to leaves: whoever opens one gets a whole file of that version,
whatever is loaded and evicted meanwhile. What an engine has open or mapped counts as taken until it lets go (`agent.hostmem`). A model's
other files (its configuration, its tokenizer) are linked to disk; pickles, hidden files and manifests are left out. Covers no lease, and no
check of what is read from disk by path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
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
        #: What is in host memory: its first files there, in the order of the manifest.
        self._near: dict[WeightsKey, tuple[ModelSource, Sequence[Path]]] = {}
        self._made: dict[WeightsKey, ModelSource] = {}
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
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            ours = (self.folder / _VERSIONS).is_dir()
            if not ours and any(self.folder.iterdir()):
                raise UsageError(f"the folder of paths {self.folder} holds something else; name an empty folder, or a new one")
            (self.folder / _VERSIONS).mkdir(exist_ok=True)
            self._lock_fd = os.open(self.folder / _VERSIONS / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock_fd)
            raise UsageError(f"another agent uses the folder of paths {self.folder}; give this one another") from exc
        except OSError as exc:
            raise UsageError(f"the folder of paths {self.folder} can't be used ({exc.strerror}); name another one") from exc

    def close(self) -> None:
        """From here on every path leads to disk; the links stay."""
        with self._guard:
            self._near.clear()
            for model in self._on_disk:
                self._settle(model)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def take(self, on_disk: Mapping[ModelName, ModelSource]) -> None:
        """These models are on disk now, and no others."""
        with self._guard:
            before, self._on_disk = self._on_disk, dict(on_disk)
            if not before:
                self._forget_leftovers()
            for model in {*before, *on_disk}:
                old, new = before.get(model), on_disk.get(model)
                if old is None or new is None or old.key != new.key or model in self._problems:
                    self._settle(model)

    def serve(self, model: ModelName, key: WeightsKey) -> None:
        """This version of a model serves from now on."""
        with self._guard:
            if self._serving.get(model) != key:
                self._serving[model] = key
                self._settle(model)

    def in_host(self, source: ModelSource, files: Sequence[Path]) -> None:
        """The first files of a model, or all of them, are in host memory, verified."""
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
            return str(self._folder_of(key)) if key in self._made else ""

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
            why = f"{exc.filename or self.folder}: {exc.strerror}"
            if self._problems.get(model) != why:
                log().warning("no_path", model=model, reason=why, then="it is tried again; make room, or move away what lies there")
            self._problems[model] = why
        else:
            self._problems.pop(model, None)

    def _settle_or_raise(self, model: ModelName) -> None:
        on_disk, serving = self._on_disk.get(model), self._serving.get(model)
        # What is only on disk may have been replaced there; what is all in memory is as it was.
        near = {
            key: source
            for key, (source, files) in self._near.items()
            if key.model == model and len(files) == len(source.manifest.files)
        }
        wanted = near | ({} if on_disk is None else {on_disk.key: on_disk})
        leads_to = serving if serving in near else on_disk.key if on_disk is not None else None
        for key, source in wanted.items():
            self._link_files(key, source)
        path = self.folder / model
        if leads_to is not None:
            _link(path, os.path.relpath(self._folder_of(leads_to), self.folder))
        elif path.is_symlink():
            path.unlink()
        for key in [key for key in self._made if key.model == model and key not in wanted]:
            shutil.rmtree(self._folder_of(key), ignore_errors=True)
            del self._made[key]

    def _link_files(self, key: WeightsKey, source: ModelSource) -> None:
        folder, disk = self._folder_of(key), source.folder.absolute()
        targets = {entry.path: disk / entry.path for entry in source.manifest.files}
        if key in self._near:
            files = zip(source.manifest.files, self._near[key][1], strict=False)  # of a part the first ones
            targets |= {entry.path: file for entry, file in files}
        if key not in self._made:
            targets = {path: disk / path for path in _other_files(disk)} | targets
        for path, target in targets.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            _link(folder / path, str(target))
        self._made[key] = source

    def _forget_leftovers(self) -> None:
        """What an agent before this one left of models and versions that are no more."""
        wanted = {self._folder_of(source.key) for source in self._on_disk.values()}
        for model in (self.folder / _VERSIONS).iterdir():
            versions = list(model.iterdir()) if model.is_dir() else []
            for version in versions:
                if version not in wanted:
                    shutil.rmtree(version, ignore_errors=True)
        for path in self.folder.iterdir():
            if path.is_symlink() and path.readlink().parts[:1] == (_VERSIONS,) and path.name not in self._on_disk:
                path.unlink()


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


def _link(path: Path, target: str) -> None:
    """Makes `path` a link to `target`, at once if it was one to something else. Raises OSError, also where it is no link."""
    with contextlib.suppress(OSError):
        if os.readlink(path) == target:
            return
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    new.symlink_to(target)
    try:
        new.rename(path)
    except OSError:
        new.unlink()
        raise
