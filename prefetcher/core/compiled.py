"""How the core's array kernels are compiled: one decorator, so that every kernel is compiled alike.

Kernels are plain functions over NumPy arrays. They are compiled by numba on first call, cached on disk, release the GIL, and use strict
IEEE arithmetic (no fast-math), so that the same input gives the same bytes in replay, in shadow caches and live.
"""

from __future__ import annotations

from numba import njit

__all__ = ["kernel"]

kernel = njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
