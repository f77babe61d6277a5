"""Manifests: what a model's files are, byte for byte, written once and believed from then on.

Covers making, writing, reading and checking manifests, and scanning a folder of models. Bytes are verified against them
by `loader` and `disk`. A manifest lies beside its model's files (`MANIFEST_NAME`); paths in it are relative to that
folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from prefetcher.agent.files import BLOCK_BYTES, hash_file, open_weights_file, weight_paths, write_whole
from prefetcher.agent.headers import read_header
from prefetcher.core.types import ModelName, ModelVersion, WeightsKey
from prefetcher.errors import IntegrityError, ManifestError, ModelNotFoundError, PrefetcherError, UnsafeFormatError

__all__ = [
    "FETCHED_NAME",
    "MANIFEST_NAME",
    "Catalog",
    "FileEntry",
    "Manifest",
    "ModelSource",
    "make_manifest",
    "models_to_publish",
    "read_manifest",
    "scan_models_folder",
    "write_manifests",
]

MANIFEST_NAME = "prefetcher.manifest.json"
#: The folder in a models folder where what was fetched from a store lies (`agent.fetched`).
FETCHED_NAME = ".prefetcher"

_FORMAT = 1
_HEX = frozenset("0123456789abcdef")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file. `blocks` are the xxh3_128 digests of its 16 MiB blocks in order; `mtime_ns` and `inode` those at its
    hashing.
    """

    path: str
    bytes: int
    sha256: str
    blocks: tuple[str, ...]
    mtime_ns: int = 0
    inode: int = 0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model's files in load order. `bytes` is their sum, `tensors` the number of tensors in all of them."""

    format: int
    model: str
    version: str
    block_bytes: int
    bytes: int
    tensors: int
    files: tuple[FileEntry, ...]

    @property
    def key(self) -> WeightsKey:
        return WeightsKey(ModelName(self.model), ModelVersion(self.version))


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this node's disk: its manifest, and the folder that its paths are relative to."""

    manifest: Manifest
    folder: Path

    @property
    def key(self) -> WeightsKey:
        return self.manifest.key


@dataclass(frozen=True, slots=True)
class Catalog:
    """Models by name, and what is wrong with the folders that are no usable model, by folder name."""

    models: dict[ModelName, ModelSource] = field(default_factory=dict)
    refused: dict[str, PrefetcherError] = field(default_factory=dict)

    def source(self, model: str) -> ModelSource:
        """The named model.

        Raises:
            ModelNotFoundError: no such model; its own error when its folder was refused.
        """
        source = self.models.get(ModelName(model))
        if source is not None:
            return source
        if model in self.refused:
            raise self.refused[model]
        known = ", ".join(sorted(self.models)[:5]) or "none"
        raise ModelNotFoundError(f"model {model!r} is not in the models folder (there: {known}); check the name", model=model)


def make_manifest(
    folder: Path, *, model: str | None = None, version: str | None = None, progress: Callable[[int], None] | None = None
) -> Manifest:
    """Reads every weight file of one model. `progress` is told the bytes of each block read. Version: `version`, else a
    digest of all.

    Raises:
        ModelNotFoundError: the folder holds no weights.
        UnsafeFormatError, IntegrityError, ManifestError: a file is refused.
    """
    name = model or folder.resolve().name
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder; name the folder that holds the models", model=name)
    paths = weight_paths(folder)
    for text in (name, *paths):
        if not text.isprintable():  # nor is what is not UTF-8
            raise ManifestError(f"{folder}: the name {text!r} has characters that cannot be printed; rename it", model=ascii(name))
    if not paths:
        raise ModelNotFoundError(f"{folder} holds no .safetensors file; name a folder with models in it", model=name)
    files: list[FileEntry] = []
    tensors: dict[str, str] = {}
    for path in paths:
        with open_weights_file(folder, path, model=name) as fd:
            header = read_header(fd, what=str(folder / path))
            before = os.fstat(fd)
            sha, blocks = hash_file(fd, before.st_size, what=str(folder / path), progress=progress)
            after = os.fstat(fd)
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise IntegrityError(f"{folder / path} changed while it was read; try again when it is complete", model=name)
        part = str(PurePosixPath(path).parent)
        for spec in header.tensors:
            qualified = spec.name if part == "." else f"{part}/{spec.name}"
            if qualified in tensors:
                raise UnsafeFormatError(
                    f"{folder}: tensor {qualified!r} is in {tensors[qualified]} and in {path}; keep one of them",
                    model=name,
                )
            tensors[qualified] = path
        files.append(FileEntry(path, before.st_size, sha, blocks, before.st_mtime_ns, before.st_ino))
    if version is None:
        text = "\n".join(f"{f.sha256} {f.path}" for f in files)
        version = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Manifest(_FORMAT, name, version, BLOCK_BYTES, sum(f.bytes for f in files), len(tensors), tuple(files))


def _write(folder: Path, manifest: Manifest) -> None:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    try:
        write_whole(folder / MANIFEST_NAME, text)
    except OSError as exc:
        raise ManifestError(f"{folder}: the manifest cannot be written ({exc.strerror}); make the folder writable") from exc


def _model_folders(folder: Path) -> list[Path]:
    """`folder` itself when it holds weights or a manifest, else its subfolders that are not hidden."""
    try:
        if not folder.is_dir():
            raise ModelNotFoundError(f"{folder} is not a folder; name the folder that holds the models")
        if any(folder.glob("*.safetensors")) or (folder / MANIFEST_NAME).exists():
            return [folder]
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".") and not _was_fetched(p))
    except OSError as exc:
        raise ModelNotFoundError(f"{folder} cannot be read ({exc.strerror}); make it readable") from exc


def _was_fetched(model: Path) -> bool:
    return model.is_symlink() and model.readlink().parts[:1] == (FETCHED_NAME,)


def _inside(folder: Path, model: Path) -> None:
    if not Path(os.path.realpath(model)).is_relative_to(os.path.realpath(folder)):
        raise ManifestError(f"{model} is a link out of the models folder; copy the model into it", model=model.name)


def write_manifests(
    folder: Path,
    *,
    version: str | None = None,
    progress: Callable[[int], None] | None = None,
    on_made: Callable[[Manifest], None] | None = None,
    on_refused: Callable[[PrefetcherError], None] | None = None,
) -> list[Manifest]:
    """Makes and writes the manifest of every model under `folder`; one that is refused doesn't keep the others from theirs, and its old
    manifest stays as it was.

    `progress` is told the bytes of each block read, `on_made` each manifest once it is written, `on_refused` what is wrong with each
    model that gets none.

    Raises:
        ModelNotFoundError: no model there.
        UnsafeFormatError, IntegrityError, ManifestError: without `on_refused`, the first model that was refused, after all others were
            made; else only that all there is are pickled weights.
    """
    made: list[Manifest] = []
    refused: list[PrefetcherError] = []
    for model in _model_folders(folder):
        try:
            _inside(folder, model)
            if model != folder and not weight_paths(model):
                continue
            manifest = make_manifest(model, version=version, progress=progress)
            _write(model, manifest)
        except PrefetcherError as exc:
            refused.append(exc)
            if on_refused:
                on_refused(exc)
            continue
        made.append(manifest)
        if on_made:
            on_made(manifest)
    if refused and not on_refused:
        raise refused[0]
    if not made and not refused:
        # Only pickles, and they lie in `folder` itself: that is the reason, not that there is nothing.
        weight_paths(folder)
        raise ModelNotFoundError(f"{folder} holds no model: no subfolder with a .safetensors file; name the folder that holds the models")
    return made


def models_to_publish(folder: Path, on_refused: Callable[[PrefetcherError], None]) -> Iterator[tuple[Path, Manifest]]:
    """Every model under `folder` with its manifest, which is made where there is none; `on_refused` is told of those that are refused.

    Raises:
        ModelNotFoundError: no model there.
    """
    found = False
    for model in _model_folders(folder):
        try:
            _inside(folder, model)
            if not (model / MANIFEST_NAME).exists():
                if not weight_paths(model):
                    continue
                _write(model, make_manifest(model))
            found = True
            manifest = read_manifest(model)
        except PrefetcherError as exc:
            found = True
            on_refused(exc)
            continue
        yield model, manifest
    if not found:
        raise ModelNotFoundError(f"{folder} holds no model: no subfolder with a .safetensors file; name the folder that holds the models")


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= _HEX


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a model's folder, checked in itself and against names, links and sizes of the files; no weight
    byte is read.

    Raises:
        ManifestError: missing, malformed, inconsistent, or it leads out of the folder.
        IntegrityError: a file is missing or has another size.
        UnsafeFormatError: it names something other than safetensors.
    """
    name = folder.name
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError as exc:
        raise ManifestError(f"{folder}: no {MANIFEST_NAME}; run `prefetcher manifest {folder}`", model=name) from exc
    except OSError as exc:
        raise ManifestError(f"{folder / MANIFEST_NAME} cannot be read ({exc.strerror}); make it readable", model=name) from exc
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as exc:
        raise ManifestError(f"{folder / MANIFEST_NAME}: {exc}; run `prefetcher manifest {folder}`", model=name) from exc
    check_manifest(manifest, where=str(folder / MANIFEST_NAME))
    for entry in manifest.files:
        with open_weights_file(folder, entry.path, model=manifest.model) as fd:
            size = os.fstat(fd).st_size
        if size != entry.bytes:
            raise IntegrityError(
                f"{folder / entry.path}: {size} bytes, the manifest says {entry.bytes}; fetch it again or run "
                f"`prefetcher manifest {folder}`",
                model=manifest.model,
            )
    return manifest


def check_manifest(manifest: Manifest, *, where: str) -> None:
    """Raises ManifestError or UnsafeFormatError when a manifest contradicts itself; `where` names it in the message."""
    again = f"run `prefetcher manifest {Path(where).parent}`"
    problem = ""
    if manifest.format != _FORMAT or manifest.block_bytes != BLOCK_BYTES:
        problem = f"format {manifest.format} with blocks of {manifest.block_bytes} bytes is not this version's"
    elif not manifest.model or "/" in manifest.model or "\0" in manifest.model or manifest.model in {".", ".."}:
        problem = f"{manifest.model!r} is no model name"
    elif not manifest.version or not manifest.files:
        problem = "version or files are missing"
    elif manifest.bytes != sum(f.bytes for f in manifest.files):
        problem = "its total is not the sum of its files"
    elif len({f.path for f in manifest.files}) != len(manifest.files):
        problem = "a file is named twice"
    for entry in manifest.files:
        if not entry.path.endswith(".safetensors"):
            raise UnsafeFormatError(f"{where}: names {entry.path!r}, which is not safetensors; {again}", model=manifest.model)
        blocks = -(-entry.bytes // BLOCK_BYTES)
        if entry.bytes <= 0 or len(entry.blocks) != blocks:
            problem = problem or f"{entry.path!r} of {entry.bytes} bytes has {len(entry.blocks)} block digests"
        elif not _is_hex(entry.sha256, 64) or not all(_is_hex(b, 32) for b in entry.blocks):
            problem = problem or f"{entry.path!r} has a malformed digest"
        elif PurePosixPath(entry.path).is_absolute() or ".." in PurePosixPath(entry.path).parts:
            problem = problem or f"{entry.path!r} leads out of the folder"
    if problem:
        raise ManifestError(f"{where}: {problem}; {again}", model=manifest.model)


def scan_models_folder(folder: Path) -> Catalog:
    """Every model under `folder` with a manifest that fits its files; what is refused is kept with its error, never
    raised.

    Raises:
        ModelNotFoundError: `folder` is no folder.
    """
    catalog = Catalog()
    for model in _model_folders(folder):
        try:
            _inside(folder, model)
            if not (model / MANIFEST_NAME).exists() and not weight_paths(model):
                continue
            manifest = read_manifest(model)
        except PrefetcherError as exc:
            catalog.refused[model.name] = exc
            continue
        except OSError as exc:
            catalog.refused[model.name] = ManifestError(f"{model} cannot be read ({exc.strerror}); make it readable", model=model.name)
            continue
        if manifest.model in catalog.models:
            catalog.refused[model.name] = ManifestError(f"{model}: the name {manifest.model!r} is taken by another folder; rename one")
            continue
        catalog.models[ModelName(manifest.model)] = ModelSource(manifest, model)
    return catalog
