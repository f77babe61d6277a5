"""Small files by name in a folder or an object store: read, written whole, and replaced only where they still are what was read.

What artifacts need, and no more: every file fits in memory. A folder is shared by processes of one machine; many machines share an object
store (s3://, gs://, az://), whose credentials come from the usual variables of its cloud and are never part of an address.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from prefetcher.errors import ArtifactError, SettingsError, UnavailableError, UsageError
from prefetcher.secrets import problem_of_place, without_secrets

__all__ = ["Blob", "Blobs", "FolderBlobs", "StoreBlobs", "blobs_at"]

_T = TypeVar("_T")

#: A store that is there answers within a round trip or two; a job may wait for one that is slow, and is run again later.
_CONNECT, _ANSWER, _RETRY = timedelta(seconds=3), timedelta(seconds=30), timedelta(seconds=10)
_RETRIES = 2
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,40})</Code>")


class Blob(NamedTuple):
    """What a file holds, and a tag that differs once it was replaced."""

    content: bytes
    tag: Any


class Blobs(Protocol):
    """Files under one place. Paths are relative, with slashes.

    Every method raises `UnavailableError` where the place does not answer, and `UsageError` where it refuses this program.
    """

    @property
    def place(self) -> str:
        """Where they are, as it may be shown."""
        ...

    def read(self, path: str, most_bytes: int) -> Blob | None:
        """The file, None where there is none. Raises `ArtifactError` for one with more bytes."""
        ...

    def write(self, path: str, content: bytes) -> None:
        """Write a file, whole or not at all; on return it outlives a power cut."""
        ...

    def replace(self, path: str, content: bytes, tag: Any) -> bool:
        """Write it only where it still has `tag` (None: is not there); whether it was written."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in `folder` ('' for the place itself) that hold any file, sorted."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder's files; one that is not there is none."""
        ...


def blobs_at(place: str | Path) -> Blobs:
    """The files at a path or address. Raises `SettingsError` for one that is none, `UsageError` where a folder can't be made."""
    text = str(place)
    if problem := problem_of_place(text):
        raise SettingsError(f"{without_secrets(text)} can't hold artifacts: {problem}")
    scheme, mark, rest = text.partition("://")
    if not mark:
        return FolderBlobs(Path(text).expanduser())
    return FolderBlobs(Path(rest)) if scheme == "file" else StoreBlobs(text)


class FolderBlobs:
    """Files in a folder of this machine, which is made with the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    @property
    def place(self) -> str:
        return str(self._folder)

    def read(self, path: str, most_bytes: int) -> Blob | None:
        at = self._folder / path
        try:
            # What is no file could make its reader wait for ever.
            with open(os.open(at, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ArtifactError(f"{at} is no file", kind="foreign")
                size = status.st_size
                if size > most_bytes:
                    raise _too_large(str(at), size, most_bytes)
                content = file.read(most_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise ArtifactError(f"{at} is no file", kind="foreign") from exc
            raise self._refused(at, exc) from exc
        return Blob(content, _digest(content))

    def write(self, path: str, content: bytes) -> None:
        at = self._folder / path
        try:
            at.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, beside = tempfile.mkstemp(prefix=".", dir=at.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                Path(beside).replace(at)
            finally:
                Path(beside).unlink(missing_ok=True)
            _sync_folder(at.parent)
        except OSError as exc:
            raise self._refused(at, exc) from exc

    def replace(self, path: str, content: bytes, tag: Any) -> bool:
        at = self._folder / path
        try:
            at.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(at.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._refused(at, exc) from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            there = _digest(at.read_bytes()) if at.exists() else None
            if there != tag:
                return False
            self.write(path, content)
        except OSError as exc:
            raise self._refused(at, exc) from exc
        finally:
            os.close(lock)
        return True

    def folders(self, folder: str) -> list[str]:
        at = self._folder / folder
        try:
            inside = [entry for entry in at.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
            return sorted(entry.name for entry in inside if any(entry.iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise self._refused(at, exc) from exc

    def remove(self, folder: str) -> None:
        at = self._folder / folder
        try:
            # Under a name that nobody looks at, first: a reader finds all of it or nothing.
            beside = at.parent / f".gone-{at.name}-{os.getpid()}"
            at.rename(beside)
            shutil.rmtree(beside)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise self._refused(at, exc) from exc

    def _refused(self, at: Path, exc: OSError) -> UsageError:
        return UsageError(f"{at} can't be read or written ({exc.strerror}); give another place with PREFETCHER_ARTIFACTS__PATH")


class StoreBlobs:
    """Files in an object store, by obstore. A replacement is a conditional put, which the store decides."""

    def __init__(self, address: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self._place = without_secrets(address)
        timeouts: Any = {"connect_timeout": _CONNECT, "timeout": _ANSWER, "allow_http": True}
        retries: Any = {"max_retries": _RETRIES, "retry_timeout": _RETRY}
        try:
            self._store: Any = from_url(address.rstrip("/"), client_options=timeouts, retry_config=retries)
        except (BaseError, ValueError) as exc:
            raise SettingsError(f"{self._place} can't be used as an object store ({type(exc).__name__}); check its address") from None

    @property
    def place(self) -> str:
        return self._place

    @property
    def store(self) -> Any:
        """obstore's own, for what is no small file; ask it by `asked`."""
        return self._store

    def read(self, path: str, most_bytes: int) -> Blob | None:
        import obstore

        def get() -> Blob:
            found = obstore.get(self._store, path)
            if found.meta["size"] > most_bytes:
                raise _too_large(f"{self._place}/{path}", found.meta["size"], most_bytes)
            return Blob(bytes(found.bytes()), {key: found.meta.get(key) for key in ("e_tag", "version")})

        try:
            return self.asked(get)
        except FileNotFoundError:
            return None

    def write(self, path: str, content: bytes) -> None:
        import obstore

        self.asked(lambda: obstore.put(self._store, path, content, use_multipart=False))

    def replace(self, path: str, content: bytes, tag: Any) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "create" if tag is None else {key: value for key, value in tag.items() if value is not None}
        try:
            self.asked(lambda: obstore.put(self._store, path, content, mode=mode))
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def folders(self, folder: str) -> list[str]:
        import obstore

        prefix = f"{folder}/" if folder else ""
        # By their files: some stores name folders for a while after the last file is gone.
        found = self.asked(lambda: obstore.list(self._store, prefix or None).collect())
        inside = (str(entry["path"]).removeprefix(prefix) for entry in found)
        return sorted({path.partition("/")[0] for path in inside if "/" in path})

    def remove(self, folder: str) -> None:
        import obstore

        def delete() -> None:
            found: Sequence[Any] = obstore.list(self._store, f"{folder}/").collect()
            # What says that a version is one goes first: nobody then takes what is left for one.
            paths = sorted((str(entry["path"]) for entry in found), key=lambda path: not path.endswith("/manifest.json"))
            for path in paths:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, path)

        self.asked(delete)

    def asked(self, ask: Callable[[], _T]) -> _T:
        """What the store answers; its own errors as the program's, without their texts, which may hold a signed address."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

        try:
            return ask()
        except (FileNotFoundError, AlreadyExistsError, PreconditionError):
            raise
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise self._refused(_answer(exc)[1]) from None
        except (BaseError, OSError) as exc:
            status, reason = _answer(exc)
            if status in (401, 403):
                raise self._refused(reason) from None
            if status == 404:
                raise UsageError(f"{self._place} is not there ({reason}); make the bucket, or name another place") from None
            raise UnavailableError(f"{self._place} does not answer ({reason}); check its address", retry_after_s=10.0) from None

    def _refused(self, reason: str) -> UsageError:
        return UsageError(f"{self._place} refuses this program ({reason}); check its credentials, as AWS_ACCESS_KEY_ID")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _too_large(path: str, size: int, most: int) -> ArtifactError:
    return ArtifactError(f"{path} has {size:,} bytes, at most {most:,} are read; it is none of this program's files", kind="foreign")


def _answer(exc: BaseException) -> tuple[int, str]:
    """The status that a store answered with (0 for none), and what it calls the reason."""
    text = str(exc)
    status, code = _STATUS.search(text), _CODE.search(text)
    reason = code.group(1) if code else type(exc).__name__.removesuffix("Error").lower()
    return (int(status.group(1)), f"{status.group(1)} {reason}") if status else (0, "no answer" if "error sending" in text else reason)
