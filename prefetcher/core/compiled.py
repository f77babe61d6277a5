"""How the core's array kernels are compiled: two decorators, so that every kernel is compiled alike.

Kernels are plain functions over NumPy arrays. They are compiled by numba on first call, cached on disk, release the GIL, and use strict
IEEE arithmetic (no fast-math), so that the same input gives the same bytes in replay, in shadow caches and live. `kernel` is for those that
Python calls, `kernel_part` for those that only kernels call. Structures of many arrays go to parts by reference (`core.references`).

Compiling takes most of a minute, nearly all of it for what grows with the number of calls × arguments × layers; hence parts without any way
in from Python, and one version of a part whatever constants it is called with. `prefetcher.compiling` does it ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.extending import register_jitable

__all__ = ["KERNELS", "fingerprint", "is_compiled", "kernel", "kernel_part"]

Function = TypeVar("Function", bound=Callable[..., Any])

#: Every kernel of the modules that were imported.
KERNELS: list[Any] = []

_fingerprints: dict[Any, str] = {}
#: No wrapper for C either: nothing calls through one.
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy", "no_cfunc_wrapper": True}
_compile_part = register_jitable(error_model="numpy", no_cfunc_wrapper=True)


def kernel_part(function: Function) -> Function:
    """A function that kernels call. Called from Python, it is the plain function and runs as Python: right for a few scalars."""
    _fingerprints[function] = fingerprint(function)
    part: Function = _compile_part(function)
    return part


def kernel(function: Callable[..., Any]) -> Any:
    """A function that Python calls, compiled for each combination of argument types and cached on disk where that can be written."""
    _fingerprints[function] = fingerprint(function)
    compiled: Any = njit(**_OPTIONS)(function)
    # Where numba finds no folder to write to, this process compiles for itself.
    with suppress(RuntimeError):
        compiled._cache = _Cache(function)
    KERNELS.append(compiled)
    return compiled


def is_compiled(of: Any) -> bool:
    """Whether a kernel is compiled for this machine: in this process or on disk."""
    machine = of.targetctx.codegen().magic_tuple()
    return bool(of.overloads) or (isinstance(of._cache, _Cache) and of._cache.holds(machine))


class _Cache(FunctionCache):
    """numba's cache on disk, which also sees changes elsewhere than in the kernel's own file, and lives with a full disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # A part or a constant in another file must not leave a stale kernel in use.
        self._cache_file._source_stamp = (self._cache_file._source_stamp, _fingerprints[function])

    def save_overload(self, signature: Any, result: Any) -> None:
        with suppress(OSError):
            super().save_overload(signature, result)

    def holds(self, machine: Any) -> bool:
        """Whether there is code for `machine` (numba's name for processor and its features)."""
        try:
            return any(key[1] == machine for key in self._cache_file._load_index())
        except OSError:
            return False


def fingerprint(function: Callable[..., Any]) -> str:
    """A digest of all that a kernel's machine code follows from: its code, the constants that it names, and the parts that it calls.

    Parts are those decorated before. Constants are numbers, text, tuples and arrays.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add_code(digest, function.__code__, function.__globals__)
    return digest.hexdigest()


def _add_code(digest: Any, code: CodeType, names: dict[str, Any]) -> None:
    digest.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant, names)
        else:
            digest.update(repr(constant).encode())
    for name in code.co_names:
        value = names.get(name)
        digest.update(name.encode())
        if isinstance(value, np.ndarray):
            digest.update(repr((value.dtype, value.shape)).encode() + value.tobytes())
        elif isinstance(value, bool | int | float | str | tuple):
            digest.update(repr(value).encode())
        else:
            called = getattr(value, "py_func", value)
            digest.update(_fingerprints.get(called, "").encode() if callable(called) else b"")
