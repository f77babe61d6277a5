"""Which node a model belongs to when nothing else says so: rendezvous hashing, the same in replay and live."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["by_rendezvous"]


def by_rendezvous(model: str, nodes: Sequence[str]) -> list[int]:
    """The nodes for a model by rendezvous hashing, its own first: by falling hash of (node, model)."""
    key = [hashlib.blake2b(f"{node}\0{model}".encode(), digest_size=8).digest() for node in nodes]
    return sorted(range(len(nodes)), key=key.__getitem__, reverse=True)
