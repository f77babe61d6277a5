"""The tiers of a replay: which there are, how much of each node's they hold, how quick the links between them are.

Weights rise from `remote` (an object store that all nodes share) over `disk` and `host` to `device`. A disk without a bound holds the whole
catalog from the start, so that nothing is ever fetched from further away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.errors import UsageError

__all__ = ["DEFAULT_DEVICE_BYTES", "DEFAULT_TIERS", "MEMORY", "Stack", "parse_tiers", "stack_of"]

DEFAULT_TIERS = ("disk", "host")
DEFAULT_DEVICE_BYTES = 80e9
#: The tiers whose GB·h are told as held.
MEMORY = ("host", "device")
_ORDER = ("remote", "disk", "host", "device")
#: Bytes a second into each tier, from the one below.
_INTO = {"disk": 1e9, "host": 3.5e9, "device": 50e9}


@dataclass(frozen=True, slots=True)
class Stack:
    """The tiers that fill and empty, the lowest first: `tiers[j]` of a node is filled over a link of `bytes_per_s[j]` from `below[j]`.

    `capacity_bytes` float64[T] is each node's. With `shared`, all nodes have one link into the lowest.
    """

    tiers: tuple[str, ...]
    below: tuple[str, ...]
    capacity_bytes: npt.NDArray[np.float64]
    bytes_per_s: npt.NDArray[np.float64]
    shared: bool

    def fits(self, size_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool[n]: which models a node has room for in every tier; the others can only be passed through."""
        room: npt.NDArray[np.bool_] = size_bytes <= self.capacity_bytes.min()
        return room

    def rates(self) -> dict[str, float]:
        """Bytes a second by edge, as `check_limits` takes them."""
        return {f"{a}>{b}": float(rate) for a, b, rate in zip(self.below, self.tiers, self.bytes_per_s, strict=True)}

    def capacities(self) -> Mapping[str, float]:
        """Bytes of a node by tier; of bounded tiers."""
        return dict(zip(self.tiers, self.capacity_bytes.tolist(), strict=True))


def parse_tiers(text: str | Sequence[str]) -> tuple[str, ...]:
    """The tiers that `text` names, the lowest first: a run of remote, disk, host, device that has disk and host.

    Raises UsageError.
    """
    names = tuple(t.strip().lower() for t in (text.split(",") if isinstance(text, str) else text) if t.strip())
    known = [_ORDER[a:b] for a in (0, 1) for b in (3, 4)]
    if names not in known:
        raise UsageError(f"--tiers {','.join(names) or text!r}: expected one of {', '.join(','.join(k) for k in known)}")
    return names


def stack_of(
    tiers: Sequence[str],
    *,
    host_bytes: float,
    device_bytes: float | None = None,
    disk_bytes: float | None = None,
    link_bytes_per_s: float = _INTO["host"],
) -> Stack:
    """The stack of `tiers` (`parse_tiers`). Raises UsageError for bytes of a tier that is not there, or a bounded disk over nothing."""
    if device_bytes is not None and "device" not in tiers:
        raise UsageError("--device-bytes is for replays with a device tier; add it, as in --tiers disk,host,device")
    if disk_bytes is not None and "remote" not in tiers:
        raise UsageError("--disk-bytes bounds the disk, so that weights come from further away; say so with --tiers remote,disk,host")
    for option, size in (("--device-bytes", device_bytes), ("--disk-bytes", disk_bytes)):
        if size is not None and not 0 < size < float("inf"):
            raise UsageError(f"{option} must be positive, got {size}")
    room = {
        "disk": disk_bytes if disk_bytes is not None else float("inf"),
        "host": host_bytes,
        "device": device_bytes if device_bytes is not None else DEFAULT_DEVICE_BYTES,
    }
    speed = {**_INTO, "host": link_bytes_per_s}
    first = _ORDER.index("host" if disk_bytes is None else "disk")
    filled = [t for t in tiers if _ORDER.index(t) >= first]
    return Stack(
        tiers=tuple(filled),
        below=tuple(_ORDER[_ORDER.index(t) - 1] for t in filled),
        capacity_bytes=np.array([room[t] for t in filled], dtype=np.float64),
        bytes_per_s=np.array([speed[t] for t in filled], dtype=np.float64),
        shared=disk_bytes is not None,
    )
