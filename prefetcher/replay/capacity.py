"""The capacity of a replay: that it is said once, and what to tell somebody who may have meant another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefetcher.errors import UsageError

__all__ = ["bytes_in_words", "capacity_notes", "check_capacity"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def check_capacity(capacity_ratio: float | None, host_bytes: object | None) -> None:
    """Raises UsageError unless exactly one of the two is given."""
    if capacity_ratio is None and host_bytes is None:
        raise UsageError("give the capacity, either --capacity-ratio or --host-bytes")
    if capacity_ratio is not None and host_bytes is not None:
        raise UsageError("--capacity-ratio and --host-bytes both say the capacity; give one, not both")


def bytes_in_words(size: float) -> str:
    """`size` with three digits that matter, in the largest unit that leaves a whole one."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} bytes"


def capacity_notes(
    size_bytes: npt.NDArray[np.int64],
    models_by_node: Sequence[npt.NDArray[np.int32]],
    capacity_bytes: float,
    capacity_ratio: float | None = None,
) -> list[str]:
    """What is odd about `capacity_bytes` a node, one sentence each; usually nothing.

    `size_bytes` int64[models]; `models_by_node` has the models that each node serves; `capacity_ratio` is what was asked for, if it was.
    """
    models, capacity = len(size_bytes), bytes_in_words(capacity_bytes)
    where = "the capacity" if len(models_by_node) == 1 else "a node's capacity"
    too_large = int((size_bytes > capacity_bytes).sum())
    if too_large == models:
        return [
            f"no model fits: {where} is {capacity}, the smallest model has {bytes_in_words(float(size_bytes.min()))}; nothing is ever kept,"
            " and all policies wait alike; give more"
        ]
    if too_large:
        fit = "models doesn't fit" if too_large == 1 else "models don't fit"
        return [
            f"{too_large:,} of {models:,} {fit}: {where} is {capacity}, the largest model has"
            f" {bytes_in_words(float(size_bytes.max()))}; they are served without being kept"
        ]
    if any(size_bytes[np.unique(own)].sum() > capacity_bytes for own in models_by_node):
        return []
    meant = "give less"
    if capacity_ratio is not None and 1 < capacity_ratio <= 100:
        meant = f"did you mean --capacity-ratio {capacity_ratio / 100:.6g}?"
    total = bytes_in_words(float(size_bytes.sum()))
    return [f"{where} holds all models, {total} of weights in {capacity}: nothing ever has to make room; {meant}"]
