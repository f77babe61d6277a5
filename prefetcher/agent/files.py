"""A model's weight files on disk, opened so that no name and no link leads out of the model's folder, and hashed.

Covers finding, opening, reading and hashing files; what a manifest says of them is `manifest`'s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import xxhash

from prefetcher.agent.headers import PICKLE_SUFFIXES, refuse_pickle
from prefetcher.errors import IntegrityError, ManifestError, NoRoomError

__all__ = ["BLOCK_BYTES", "block_digest", "hash_file", "open_weights_file", "read_block", "weight_paths", "write_whole"]

#: The unit of reading and of digests: large enough that a disk's queue stays full, small enough that a bad block costs
#: little.
BLOCK_BYTES = 16 << 20


def block_digest(block: bytes | memoryview) -> str:
    """The digest of one block, 32 hexadecimal digits. Large blocks are hashed without the interpreter's lock."""
    return str(xxhash.xxh3_128_hexdigest(block))


@contextmanager
def open_weights_file(folder: Path, relative: str, *, model: str, direct: bool = False) -> Iterator[int]:
    """A read-only descriptor of a regular file inside `folder`. `direct` asks for O_DIRECT and raises OSError (EINVAL) where there is none.

    Raises:
        ManifestError: the path, or a link on it, leads out of the folder, or is no regular file.
        IntegrityError: the file is not there, or may not be read.
        NoRoomError: this process may open no more files.
    """
    fd = _open_inside(folder, relative, model, os.O_DIRECT if direct else 0)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_inside(folder: Path, relative: str, model: str, flags: int) -> int:
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in relative:
        raise ManifestError(f"model {model!r}: the path {relative!r} leads out of its folder; make the manifest again", model=model)
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
    except OSError as exc:
        if exc.errno == errno.EINVAL and flags:
            raise
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise NoRoomError(f"model {model!r}: too many open files; raise `ulimit -n`") from exc
        raise IntegrityError(f"model {model!r}: {folder / pure} cannot be opened ({exc.strerror}); make it readable", model=model) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ManifestError(f"model {model!r}: {relative!r} is not a regular file", model=model)
    return fd


def weight_paths(folder: Path) -> list[str]:
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


def hash_file(fd: int, size: int, *, what: str, progress: Callable[[int], None] | None = None) -> tuple[str, tuple[str, ...]]:
    """sha256 of the file and the digests of its blocks, reading one block at a time; `progress` is told the bytes of each.

    Raises:
        IntegrityError: the file can't be read or became shorter; `what` names it.
    """
    whole = hashlib.sha256()
    blocks: list[str] = []
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
    for offset in range(0, size, BLOCK_BYTES):
        view = buffer[: min(BLOCK_BYTES, size - offset)]
        read_block(fd, view, offset, what=what)
        whole.update(view)
        blocks.append(block_digest(view))
        if progress:
            progress(len(view))
    return whole.hexdigest(), tuple(blocks)


def read_block(fd: int, view: memoryview, offset: int, *, what: str) -> None:
    """Fills `view` from the file's bytes at `offset`. Raises IntegrityError where they can't be read; `what` names the file."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as exc:
            raise IntegrityError(f"{what} cannot be read ({exc.strerror}); fetch it again, or look after the disk") from exc
        if count == 0:
            raise IntegrityError(f"{what} became shorter while it was read; fetch it again")
        done += count


def write_whole(path: Path, text: bytes) -> None:
    """Replaces a file at once, or leaves it as it was and raises OSError: a temporary name, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
