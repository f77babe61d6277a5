"""A dozen real models for the demo: safetensors files of random half-precision weights, 1.5 GB in all.

Covers making the files and manifests, and remembering what one tensor of each must hash to. Covers no serving.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from prefetcher.agent.manifest import write_manifests
from prefetcher.errors import NoRoomError

__all__ = ["MODELS", "DemoModel", "drop_from_page_cache", "make_models"]

#: Name and megabytes: 40 to 400 MB, 1.5 GB together.
MODELS: tuple[tuple[str, int], ...] = (
    ("chat-large", 400),
    ("code-large", 240),
    ("chat-small", 160),
    ("vision", 120),
    ("translate", 100),
    ("summarize", 100),
    ("speech", 80),
    ("rerank", 80),
    ("embed", 60),
    ("moderate", 60),
    ("ocr", 50),
    ("adapter-legal", 40),
)
_TENSORS = 8
_CHUNK_BYTES = 4 << 20
#: Free space beyond the models themselves: state, logs and the page.
_SPARE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model, its folder, its tensors' bytes, and the xxh3_64 of the tensor that clients check."""

    name: str
    folder: Path
    bytes: int
    checked_tensor: str
    digest: int


def make_models(
    folder: Path,
    sizes: tuple[tuple[str, int], ...] = MODELS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[DemoModel]:
    """Writes one folder for each model, and its manifest. The same seed gives the same bytes.

    Raises:
        NoRoomError: the disk has too little free space; nothing was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    need = sum(mb for _, mb in sizes) * 1_000_000 + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise NoRoomError(f"{folder} has {free / 1e9:.1f} GB free and the demo needs {need / 1e9:.1f}; name another --out")
    rng = np.random.default_rng(seed)
    made = []
    for name, mb in sizes:
        progress(f"writing {name}, {mb} MB")
        made.append(_write_model(folder / name, name, mb * 1_000_000, rng))
    progress("hashing manifests")
    write_manifests(folder)
    for model in made:
        drop_from_page_cache(model.folder)
    return made


def drop_from_page_cache(folder: Path) -> None:
    """Has the system forget a model's files, so that whoever opens them reads the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_model(folder: Path, name: str, total: int, rng: np.random.Generator) -> DemoModel:
    """One shard of `_TENSORS` F16 matrices, 1,024 wide."""
    rows = total // _TENSORS // 2048
    size = rows * 2048
    header = {
        f"layers.{i}.weight": {"dtype": "F16", "shape": [rows, 1024], "data_offsets": [i * size, (i + 1) * size]} for i in range(_TENSORS)
    }
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    folder.mkdir(exist_ok=True)
    hashed = xxhash.xxh3_64()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for i in range(_TENSORS):
            for start in range(0, size, _CHUNK_BYTES):
                block = rng.bytes(min(_CHUNK_BYTES, size - start))
                file.write(block)
                if i == 0:
                    hashed.update(block)
    return DemoModel(name, folder, size * _TENSORS, "layers.0.weight", hashed.intdigest())
