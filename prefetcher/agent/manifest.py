"""Manifests: what a model's files are, byte for byte, written once and believed from then on.

Covers making, writing, reading and checking manifests, and scanning a folder of models. Bytes are verified against them
by `loader` and `disk`. A manifest lies beside its model's files (`MANIFEST_NAME`); paths in it are relative to that
folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from prefetcher.agent.headers import PICKLE_SUFFIXES, read_header, refuse_pickle
from prefetcher.core.types import ModelName, ModelVersion, WeightsKey
from prefetcher.errors import IntegrityError, ManifestError, ModelNotFoundError, PrefetcherError, UnsafeFormatError

__all__ = [
    "BLOCK_BYTES",
    "MANIFEST_NAME",
    "Catalog",
    "FileEntry",
    "Manifest",
    "ModelSource",
    "block_digest",
    "make_manifest",
    "open_weights_file",
    "read_manifest",
    "scan_models_folder",
    "write_manifests",
]

MANIFEST_NAME = "prefetcher.manifest.json"

#: The unit of reading and of digests: large enough that a disk's queue stays full, small enough that a bad block costs
#: little.
BLOCK_BYTES = 16 << 20

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
        raise ModelNotFoundError(
            f"model {model!r} is not in the models folder (there: {known}); check the name", model=model
        )


def block_digest(block: bytes | memoryview) -> str:
    """The digest of one block, 32 hexadecimal digits. Large blocks are hashed without the interpreter's lock."""
    return str(xxhash.xxh3_128_hexdigest(block))


@contextmanager
def open_weights_file(folder: Path, relative: str, *, model: str, direct: bool = False) -> Iterator[int]:
    """A read-only descriptor of a regular file inside `folder`. `direct` asks for O_DIRECT and raises OSError where
    there is none.

    Raises:
        ManifestError: the path, or a link on it, leads out of the folder, or is no regular file.
        IntegrityError: the file is not there.
    """
    fd = _open_inside(folder, relative, model, os.O_DIRECT if direct else 0)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_inside(folder: Path, relative: str, model: str, flags: int) -> int:
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in relative:
        raise ManifestError(
            f"model {model!r}: the path {relative!r} leads out of its folder; make the manifest again", model=model
        )
    real = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(real / pure))
    if not target.is_relative_to(real):
        raise ManifestError(
            f"model {model!r}: {relative!r} is a link out of its folder (to {target}); copy the file into {folder}",
            model=model,
        )
    try:
        fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
    except FileNotFoundError as exc:
        raise IntegrityError(f"model {model!r}: {folder / pure} is missing; fetch it again", model=model) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ManifestError(f"model {model!r}: {relative!r} is not a regular file", model=model)
    return fd


def _weight_paths(folder: Path) -> list[str]:
    """Relative paths of the safetensors files under `folder`, sorted; hidden and linked folders are left out."""
    found: list[str] = []
    pickled: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in names:
            path = Path(root, name)
            if name.startswith("."):
                continue
            if path.suffix == ".safetensors":
                found.append(path.relative_to(folder).as_posix())
            elif path.suffix.lower() in PICKLE_SUFFIXES:
                pickled.append(path)
    if not found and pickled:
        refuse_pickle(min(pickled))
    return sorted(found)


def _hash_file(fd: int, size: int, progress: Callable[[int], None] | None) -> tuple[str, tuple[str, ...]]:
    """sha256 of the file and the digests of its blocks, reading one block at a time."""
    whole = hashlib.sha256()
    blocks: list[str] = []
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
    for offset in range(0, size, BLOCK_BYTES):
        view = buffer[: min(BLOCK_BYTES, size - offset)]
        if _read_exactly(fd, view, offset) != len(view):
            raise IntegrityError("the file became shorter while it was read; fetch it again")
        whole.update(view)
        blocks.append(block_digest(view))
        if progress:
            progress(len(view))
    return whole.hexdigest(), tuple(blocks)


def _read_exactly(fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


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
    paths = _weight_paths(folder)
    if not paths:
        raise ModelNotFoundError(f"{folder} holds no .safetensors file; name a folder with models in it", model=name)
    files: list[FileEntry] = []
    tensors: dict[str, str] = {}
    for path in paths:
        with open_weights_file(folder, path, model=name) as fd:
            header = read_header(fd, what=str(folder / path))
            before = os.fstat(fd)
            sha, blocks = _hash_file(fd, before.st_size, progress)
            after = os.fstat(fd)
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise IntegrityError(
                f"{folder / path} changed while it was read; try again when it is complete", model=name
            )
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
    temporary = folder / f".{MANIFEST_NAME}.{os.getpid()}"
    try:
        with temporary.open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(folder / MANIFEST_NAME)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise ManifestError(
            f"{folder}: the manifest cannot be written ({exc.strerror}); make the folder writable"
        ) from exc
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _model_folders(folder: Path) -> list[Path]:
    """`folder` itself when it holds weights or a manifest, else its subfolders that are not hidden; each must lie
    inside it.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder; name the folder that holds the models")
    if any(folder.glob("*.safetensors")) or (folder / MANIFEST_NAME).exists():
        return [folder]
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _inside(folder: Path, model: Path) -> None:
    if not Path(os.path.realpath(model)).is_relative_to(os.path.realpath(folder)):
        raise ManifestError(f"{model} is a link out of the models folder; copy the model into it", model=model.name)


def write_manifests(
    folder: Path, *, version: str | None = None, progress: Callable[[int], None] | None = None
) -> list[Manifest]:
    """Makes and writes the manifest of every model under `folder`: all of them, or at the first bad one none after it.

    Raises:
        ModelNotFoundError: no model there.
        UnsafeFormatError, IntegrityError, ManifestError: a model is refused; its old manifest stays as it was.
    """
    made: list[Manifest] = []
    for model in _model_folders(folder):
        _inside(folder, model)
        if model != folder and not _weight_paths(model):
            continue
        manifest = make_manifest(model, version=version, progress=progress)
        _write(model, manifest)
        made.append(manifest)
    if not made:
        raise ModelNotFoundError(f"{folder} holds no model: no subfolder with a .safetensors file")
    return made


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
    except OSError as exc:
        raise ManifestError(f"{folder}: no {MANIFEST_NAME}; run `prefetcher manifest {folder}`", model=name) from exc
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
            raise UnsafeFormatError(
                f"{where}: names {entry.path!r}, which is not safetensors; {again}", model=manifest.model
            )
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
            if not (model / MANIFEST_NAME).exists() and not _weight_paths(model):
                continue
            manifest = read_manifest(model)
        except PrefetcherError as exc:
            catalog.refused[model.name] = exc
            continue
        if manifest.model in catalog.models:
            catalog.refused[model.name] = ManifestError(
                f"{model}: the name {manifest.model!r} is taken by another folder"
            )
            continue
        catalog.models[ModelName(manifest.model)] = ModelSource(manifest, model)
    return catalog
