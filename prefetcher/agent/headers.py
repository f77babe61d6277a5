"""The header of a safetensors file, read as strictly as the format allows: what lies where, or why the file is refused.

Covers layout and safety; says nothing about digests (`manifest`).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from prefetcher.errors import IntegrityError, UnsafeFormatError

__all__ = [
    "DTYPE_BITS",
    "MAX_HEADER_BYTES",
    "PICKLE_SUFFIXES",
    "Header",
    "TensorSpec",
    "parse_header",
    "read_header",
    "refuse_pickle",
]

#: Bits of one element, by the format's dtype names.
DTYPE_BITS: dict[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

#: The format's own bound: a header longer than this is an attack or an accident.
MAX_HEADER_BYTES = 100_000_000

#: Suffixes under which pickled weights are published.
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})

_AGAIN = "fetch it again"
_CONVERT = "convert it with safetensors.torch.save_file; pickles run code when they are opened and are never read"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its dtype by the format's name, its shape, and its bytes [start, end) counted from the start of the
    file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors in file order; `data_start` is where their bytes begin."""

    tensors: tuple[TensorSpec, ...]
    data_start: int


def _short(value: object) -> str:
    """What a file says, for a message: it may say a hundred megabytes."""
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " …"


class _Duplicate(ValueError):
    """A key that occurs twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _Duplicate("a key occurs twice")
    return out


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _spec(name: str, entry: Any, data_start: int, what: str) -> TensorSpec:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UnsafeFormatError(f"{what}: tensor {_short(name)} needs exactly dtype, shape and data_offsets; {_AGAIN}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise UnsafeFormatError(f"{what}: tensor {_short(name)} has the unknown dtype {_short(dtype)}; {_AGAIN}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise UnsafeFormatError(f"{what}: tensor {_short(name)} has the shape {_short(shape)}; expected a list of sizes; {_AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise UnsafeFormatError(f"{what}: tensor {_short(name)} has the offsets {_short(offsets)}; expected [begin, end]; {_AGAIN}")
    bits = prod(shape) * DTYPE_BITS[dtype]
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise UnsafeFormatError(
            f"{what}: tensor {_short(name)} of {dtype} {_short(shape)} needs {bits / 8:g} bytes, its offsets span {end - begin}; {_AGAIN}"
        )
    return TensorSpec(name, dtype, tuple(shape), data_start + begin, data_start + end)


def parse_header(raw: bytes, file_bytes: int, *, what: str) -> Header:
    """The header whose 8 length bytes and JSON text are `raw`, of a file of `file_bytes`.

    Raises:
        UnsafeFormatError: the header lies, overlaps, leaves holes, or does not end where the file does; `what` names
        the file.
    """
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length]
    if len(text) != length or not text.startswith(b"{"):
        raise UnsafeFormatError(f"{what}: the header is not {length} bytes of JSON; {_CONVERT}")
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise UnsafeFormatError(f"{what}: the header is not valid JSON ({exc}); {_AGAIN}") from exc
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UnsafeFormatError(f"{what}: __metadata__ must map texts to texts; {_AGAIN}")
    data_start = 8 + length
    specs = sorted((_spec(n, e, data_start, what) for n, e in entries.items()), key=lambda s: (s.start, s.end))
    position = data_start
    for spec in specs:
        if spec.start != position:
            kind = "overlaps the one before" if spec.start < position else "leaves a hole before it"
            raise UnsafeFormatError(f"{what}: tensor {_short(spec.name)} {kind} (at {spec.start}, expected {position}); {_AGAIN}")
        position = spec.end
    if position > file_bytes:
        raise IntegrityError(f"{what}: truncated, its header promises {position} bytes and {file_bytes} are there; {_AGAIN}")
    if position < file_bytes:
        raise UnsafeFormatError(f"{what}: {file_bytes - position} bytes belong to no tensor; {_AGAIN}")
    return Header(tuple(specs), data_start)


def read_header(fd: int, *, what: str) -> Header:
    """Reads and checks the header of an open file.

    Raises:
        UnsafeFormatError: not safetensors, or a header that lies.
        IntegrityError: empty or shorter than its header says.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        raise IntegrityError(f"{what}: empty; {_AGAIN}")
    start = os.pread(fd, 8, 0)
    if len(start) < 8:
        raise IntegrityError(f"{what}: truncated to {size} bytes; {_AGAIN}")
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER_BYTES:
        # Asked only here: a sound header of 640 bytes begins like a pickle.
        if start[:2] == b"PK" or (start[:1] == b"\x80" and 2 <= start[1] <= 5):
            raise UnsafeFormatError(f"{what}: a pickle under another name; {_CONVERT}")
        raise UnsafeFormatError(f"{what}: not safetensors (a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed); {_AGAIN}")
    if 8 + length > size:
        raise IntegrityError(f"{what}: truncated, its header alone is {length} bytes and the file has {size}; {_AGAIN}")
    return parse_header(start + os.pread(fd, length, 8), size, what=what)


def refuse_pickle(path: Path) -> None:
    """Raises UnsafeFormatError when the file's name says that it is pickled."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise UnsafeFormatError(f"{path}: pickled weights; {_CONVERT}")
