"""Writes models into a store, each as `MODEL/VERSION/` of its own: files first, checked as they are read, and the manifest last.

Nobody who fetches sees a model before its manifest is there, and a version that is fetched just now stays as it is when another one is
published. Publishing a version again makes it the one that counts. Nothing is removed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from prefetcher.agent.files import BLOCK_BYTES, block_digest, open_weights_file, read_block
from prefetcher.agent.manifest import MANIFEST_NAME, FileEntry, Manifest, models_to_publish
from prefetcher.errors import IntegrityError, PrefetcherError
from prefetcher.ports import WeightsStore

__all__ = ["publish_models"]


def publish_models(folder: Path, store: WeightsStore, *, on_refused: Callable[[PrefetcherError], None]) -> Iterator[tuple[Manifest, str]]:
    """Publishes every model under `folder`, or `folder` itself where it is one, and yields each with its place in the store once it is
    there; manifests are made where there are none. `on_refused` is told what is wrong with a model that is left out.

    Raises:
        ModelNotFoundError: no model there.
        UnavailableError, RateLimitedError, UsageError, NoRoomError: the store takes no more; what is not yielded is not published.
    """
    for model, manifest in models_to_publish(folder, on_refused):
        there = f"{quote(manifest.model, safe=' @+=,')}/{quote(manifest.version, safe=' @+=,')}"
        try:
            for entry in manifest.files:
                store.write(f"{there}/{entry.path}", _parts(manifest, model, entry))
        except IntegrityError as exc:
            on_refused(exc)
            continue
        plain = tuple(msgspec.structs.replace(entry, mtime_ns=0, inode=0) for entry in manifest.files)
        text = msgspec.json.encode(msgspec.structs.replace(manifest, files=plain))
        store.write(f"{there}/{MANIFEST_NAME}", iter([text]))
        yield manifest, f"{store.place}/{there}"


def _parts(manifest: Manifest, folder: Path, entry: FileEntry) -> Iterator[bytes]:
    """A file's blocks. Raises IntegrityError before one is given on that is not the manifest's."""
    where = f"{manifest.model}: {entry.path}"
    with open_weights_file(folder, entry.path, model=manifest.model) as fd:
        if os.fstat(fd).st_size != entry.bytes:
            raise IntegrityError(f"{where} is not as long as its manifest says; run `prefetcher manifest {folder}`", model=manifest.model)
        for index, digest in enumerate(entry.blocks):
            block = bytearray(min(BLOCK_BYTES, entry.bytes - index * BLOCK_BYTES))
            read_block(fd, memoryview(block), index * BLOCK_BYTES, what=where)
            if block_digest(memoryview(block)) != digest:
                raise IntegrityError(
                    f"{where} differs from its manifest in block {index}; run `prefetcher manifest {folder}`", model=manifest.model
                )
            yield bytes(block)
