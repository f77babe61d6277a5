"""The store that models are fetched from: whether it answers, what it has, and whether the disk has room for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from prefetcher.agent.store_catalog import StoreCatalog
from prefetcher.config import Settings
from prefetcher.doctor.finding import Finding, fail, ok, warn
from prefetcher.errors import PrefetcherError, SettingsError, shortened
from prefetcher.words import size

__all__ = ["check_store"]


def check_store(settings: Settings) -> Finding:
    """Whether models can be fetched as the settings say. Reads lists and manifests, no weights."""
    from prefetcher_connectors.weights_store import weights_store_at

    given = settings.store
    if given.url is None:
        return ok("none is set: models are those of the models folder")
    try:
        store = weights_store_at(given.url)
    except SettingsError as exc:
        return fail(str(exc), "set PREFETCHER_STORE__URL to a folder or the address of one")
    try:
        with tempfile.TemporaryDirectory() as nowhere:
            found = StoreCatalog(store, Path(nowhere)).look()
    except PrefetcherError as exc:
        return fail(str(exc), "models that are not on disk wait until it answers: look after its address, its credentials and the network")
    finally:
        store.close()
    sizes = {model.model: model.bytes for model in found.models.values()}
    words = f"{len(sizes)} models with {size(sum(sizes.values()))} in {store.place}"
    if found.refused:
        name, error = min(found.refused.items())
        return warn(f"{words}; {len(found.refused)} refused, as {shortened(name)}", str(error))
    if not sizes:
        return warn(words, f"`prefetcher publish FOLDER {store.place}` writes a folder of models there")
    room = _room(settings)
    largest = max(sizes, key=lambda name: sizes[name])
    if sizes[largest] > room:
        todo = "make room on the disk, or raise PREFETCHER_STORE__DISK_BYTES"
        return warn(f"{words}; {shortened(largest)} alone has {size(sizes[largest])}, the models folder has room for {size(room)}", todo)
    return ok(f"{words}; the models folder has room for {size(room)}")


def _room(settings: Settings) -> int:
    folder = settings.node.models_dir.expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    stat = os.statvfs(there)
    free = max(0, stat.f_bavail * stat.f_frsize - settings.store.disk_reserve_bytes)
    return free if settings.store.disk_bytes is None else min(free, settings.store.disk_bytes)
