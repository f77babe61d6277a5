"""Which models a store has, by their manifests, and which of them proved bad.

A model is a manifest beside its files, at any depth below the store's place; of several with one name the one that was written last counts.
What was found is kept in the state folder, so that a node that starts while the store is away knows its models; a manifest is read again
only where its tag differs. A model of which a byte was wrong is out until one of its files or its manifest is replaced, restart or not.
Covers no transfers. For one thread at a time, but for `quarantine`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

import msgspec

from prefetcher.agent.files import write_whole
from prefetcher.agent.manifest import MANIFEST_NAME, Manifest, check_manifest
from prefetcher.core.types import ModelName, ModelVersion, WeightsKey
from prefetcher.errors import ChangedError, IntegrityError, ManifestError, PrefetcherError, TemporaryError
from prefetcher.ports import StoredObject, WeightsStore
from prefetcher.telemetry.logs import log

__all__ = ["MANIFEST_BYTES", "StoreCatalog", "StoreModel", "StoreModels"]

#: A manifest has 35 bytes for each 16 MiB of weights.
MANIFEST_BYTES = 64 << 20
_READ_AT_ONCE = 8
_T = TypeVar("_T")


class StoreModel(msgspec.Struct, frozen=True):
    """A model in the store: `folder` is where, `files` are paths in it with their bytes, `tag` that of its manifest."""

    model: str
    version: str
    bytes: int
    folder: str
    tag: str
    modified_s: float
    files: tuple[tuple[str, int], ...]

    @property
    def key(self) -> WeightsKey:
        return WeightsKey(ModelName(self.model), ModelVersion(self.version))


class _Bad(msgspec.Struct, frozen=True):
    """What was wrong with a folder of the store when its files had these tags."""

    tags: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreModels:
    """What one look found: models by name, and what is wrong with folders that are no usable model."""

    models: Mapping[ModelName, StoreModel] = field(default_factory=dict)
    refused: Mapping[str, PrefetcherError] = field(default_factory=dict)


class StoreCatalog:
    """The models of `store`; what is known of it is kept in `folder`."""

    def __init__(self, store: WeightsStore, folder: Path) -> None:
        self.store = store
        self._known_in, self._bad_in = folder / "store-models.json", folder / "store-quarantine.json"
        self._guard = threading.Lock()
        self._bad: dict[str, _Bad] = _read(self._bad_in, dict[str, _Bad], {})
        known = _read(self._known_in, list[StoreModel], [])
        self.found = StoreModels({ModelName(each.model): each for each in known})
        #: By folder: a manifest that was read, or what is wrong with it, and the tag that it had.
        self._read: dict[str, tuple[str, StoreModel | PrefetcherError]] = {each.folder: (each.tag, each) for each in known}
        self._objects: dict[str, StoredObject] = {}

    def look(self) -> StoreModels:
        """Asks the store.

        Raises:
            TemporaryError: it does not answer; what was found before stands.
            UsageError: it refuses this program.
        """
        objects = {found.path: found for found in self.store.objects()}
        manifests = {str(PurePosixPath(path).parent): found for path, found in objects.items() if PurePosixPath(path).name == MANIFEST_NAME}
        new = [(folder, found) for folder, found in manifests.items() if self._read.get(folder, ("",))[0] != _tag(found)]
        with ThreadPoolExecutor(_READ_AT_ONCE) as readers:
            for (folder, found), answer in zip(new, readers.map(lambda each: self._read_one(*each), new), strict=True):
                self._read[folder] = (_tag(found), answer)
        self._read = {folder: self._read[folder] for folder in manifests}
        models: dict[ModelName, StoreModel] = {}
        refused: dict[str, PrefetcherError] = {}
        for folder, (_, answer) in sorted(self._read.items()):
            if isinstance(answer, PrefetcherError):
                refused[folder] = answer
                continue
            if (problem := self._problem(answer, objects)) is not None:
                refused[folder] = problem
                continue
            before = models.get(ModelName(answer.model))
            if before is None or (before.modified_s, before.folder) < (answer.modified_s, answer.folder):
                models[ModelName(answer.model)] = answer
        self._objects = objects
        changed = models != self.found.models
        self.found = StoreModels(models, refused)
        if changed:
            _write(self._known_in, list(models.values()))
        return self.found

    def _read_one(self, folder: str, found: StoredObject) -> StoreModel | PrefetcherError:
        where = f"{self.store.place}/{found.path}"
        try:
            manifest = _decode(self.store.read(found.path, MANIFEST_BYTES), where)
        except TemporaryError:
            raise
        except PrefetcherError as exc:
            return exc
        files = tuple((entry.path, entry.bytes) for entry in manifest.files)
        return StoreModel(manifest.model, manifest.version, manifest.bytes, folder, _tag(found), found.modified_s, files)

    def _problem(self, model: StoreModel, objects: Mapping[str, StoredObject]) -> PrefetcherError | None:
        """What is wrong with a model by the store's own list, or was found wrong in its bytes."""
        for path, size in model.files:
            found = objects.get(_join(model.folder, path))
            if found is None or found.bytes != size:
                what = "is missing" if found is None else f"has {found.bytes} bytes, the manifest says {size}"
                return IntegrityError(f"{self.store.place}/{_join(model.folder, path)} {what}; publish it again", model=model.model)
        bad = self._bad.get(model.folder)
        if bad is None:
            return None
        if bad.tags == _tags(model, objects):
            return IntegrityError(f"quarantined: {bad.reason}", model=model.model)
        with self._guard:
            self._bad.pop(model.folder, None)
            _write(self._bad_in, self._bad)
        return None

    def plan(self, key: WeightsKey) -> tuple[Manifest, dict[str, StoredObject]]:
        """The manifest of a model and its files in the store by their path in it.

        Raises:
            ChangedError: the store has another version now, or none.
            ManifestError, TemporaryError, UsageError: it can't be read.
        """
        if not self._objects:
            self.look()
        model = self.found.models.get(key.model)
        if model is None or model.key != key:
            raise ChangedError(f"{key.model} is no longer in {self.store.place} in version {key.version}")
        path = _join(model.folder, MANIFEST_NAME)
        manifest = _decode(self.store.read(path, MANIFEST_BYTES), f"{self.store.place}/{path}")
        objects = {entry.path: self._objects.get(_join(model.folder, entry.path)) for entry in manifest.files}
        there = {path: found for path, found in objects.items() if found is not None}
        if manifest.key != key or len(there) < len(objects):
            raise ChangedError(f"{key.model} was published again in {self.store.place}")
        return manifest, there

    def quarantine(self, key: WeightsKey, reason: str) -> None:
        """The model's bytes are not those of its manifest: it is none until it was published again."""
        model = self.found.models.get(key.model)
        if model is None or model.key != key:
            return
        with self._guard:
            self._bad = {**self._bad, model.folder: _Bad(_tags(model, self._objects), reason)}
            _write(self._bad_in, self._bad)


def _decode(raw: bytes, where: str) -> Manifest:
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as exc:
        raise ManifestError(f"{where}: {exc}; publish it again") from exc
    check_manifest(manifest, where=where)
    return manifest


def _join(folder: str, path: str) -> str:
    return path if folder in ("", ".") else f"{folder}/{path}"


def _tag(found: StoredObject) -> str:
    return found.tag or f"{found.modified_s}-{found.bytes}"


def _tags(model: StoreModel, objects: Mapping[str, StoredObject]) -> str:
    """One tag for all files of a model and its manifest."""
    paths = [_join(model.folder, path) for path, _ in model.files]
    return hashlib.sha256("\n".join([model.tag, *(_tag(objects[path]) for path in paths if path in objects)]).encode()).hexdigest()


def _read(path: Path, kind: type[_T], without: _T) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return without
    except (OSError, msgspec.MsgspecError) as exc:
        log().warning("store_notes_unreadable", path=str(path), reason=str(exc), then="the store is asked anew")
        return without


def _write(path: Path, content: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(content))
    except OSError as exc:
        log().warning("store_notes_not_kept", path=str(path), reason=str(exc), then="they end with this process")
