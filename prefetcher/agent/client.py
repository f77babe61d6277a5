"""`prefetcher.open`: another process's view of a model's weights, without a copy, under a lease.

Covers asking the agent, mapping its descriptors and making arrays. Imports NumPy and torch only when they are asked
for.

While it is open, the agent may not evict the weights. Closing it releases the lease; an array that still lives keeps
its own mapping alive, and because a published file is never rewritten, its bytes stay right: they count as taken until
the last such array is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from prefetcher.agent import protocol
from prefetcher.agent.headers import TensorSpec, read_header
from prefetcher.agent.protocol import Acquire, Connection, Control, Descriptors, Failed, Granted, Release, Reply, Verb
from prefetcher.errors import NoRoomError, UnavailableError, UsageError

__all__ = ["OpenModel", "ask", "open_model"]

#: Linux's flag, which Python 3.11's mmap does not name.
_MAP_NORESERVE = 0x4000

#: NumPy's own dtypes by the format's names; what it lacks is in `_ML_DTYPES`.
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip

#: What the ml_dtypes package calls the rest, and the unsigned integers of the same width that stand in where it is not
#: installed.
_ML_DTYPES = {
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "F8_E8M0": ("float8_e8m0fnu", "u1"),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", "u1"),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", "u1"),
}

_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


class OpenModel(Mapping[str, Any]):
    """Tensors by name; a context manager. Arrays are made when they are asked for and share memory with the agent.

    NumPy arrays are read-only. torch tensors are private views: writing to one copies its page and changes nothing for
    others. `source` is `host`, or `disk` where host memory was bypassed; `found` what the request met, `wait_s` how
    long it waited. `path` is a folder of the same files, for what reads files itself; '' where the agent gives no paths.
    `dtypes[name]` is the format's own name: BF16 and the 8-bit floats come to NumPy as ml_dtypes' where that is
    installed, else as unsigned integers with the same bits; 4- and 6-bit floats as one row of packed bytes in both
    frameworks.
    """

    def __init__(self, connection: Connection, grant: Granted, fds: list[int], framework: Literal["numpy", "torch"]) -> None:
        self.model, self.version, self.source = grant.model, grant.version, grant.source
        self.found, self.wait_s, self.path, self.framework = grant.found, grant.wait_s, grant.path, framework
        self.bytes = sum(f.bytes for f in grant.files)
        self._lease = grant.id
        self._process = os.getpid()
        self._connection: Connection | None = connection
        self._maps: list[mmap.mmap] = []
        self._specs: dict[str, tuple[int, TensorSpec]] = {}
        # Private and writable for torch, which has no read-only tensors; no swap is reserved for pages that nobody
        # writes.
        flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
        if framework == "torch":
            flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        for number, (fd, file) in enumerate(zip(fds, grant.files, strict=True)):
            part = str(PurePosixPath(file.path).parent)
            for spec in read_header(fd, what=f"{grant.model}: {file.path}").tensors:
                self._specs[spec.name if part == "." else f"{part}/{spec.name}"] = (number, spec)
            try:
                self._maps.append(mmap.mmap(fd, file.bytes, flags=flags, prot=prot))
            except OSError as exc:
                limit = "raise its limit of address space (`ulimit -v`) or of mappings (vm.max_map_count)"
                raise NoRoomError(f"this process can't map {grant.model} ({exc.strerror}); {limit}") from exc

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: spec.dtype for name, (_, spec) in self._specs.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, (_, spec) in self._specs.items()}

    def __getitem__(self, name: str) -> Any:
        number, spec = self._specs[name]
        if self._connection is None:
            raise UsageError(f"{self.model} was closed; use its tensors inside the `with` block")
        return (_torch_view if self.framework == "torch" else _numpy_view)(self._maps[number], spec)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the mappings, which go with the last array that uses them, and releases the lease. Closing twice is
        no error.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # Never mapping.close(): torch keeps the mapping but not its buffer, and would read unmapped memory.
        self._maps.clear()
        if os.getpid() != self._process:  # a fork's copy: the lease is the parent's to give back
            connection.close()
            return
        try:
            connection.sock.settimeout(5)
            connection.send(Release(self._lease + 1, self._lease))
            connection.receive()
        except (OSError, msgspec.MsgspecError):
            pass  # the agent is gone or slow; the end of the connection releases as well
        finally:
            connection.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close()


def _numpy_view(buffer: mmap.mmap, spec: TensorSpec) -> Any:
    import numpy as np

    length = spec.end - spec.start
    dtype: Any = _NUMPY.get(spec.dtype)
    shape = spec.shape
    if spec.dtype in _ML_DTYPES:
        name, stand_in = _ML_DTYPES[spec.dtype]
        try:
            dtype = getattr(__import__("ml_dtypes"), name)
        except (ImportError, AttributeError):
            dtype = stand_in
    elif dtype is None:
        dtype, shape = "u1", (length,)
    if length == 0:
        empty = np.empty(shape, dtype)
        empty.flags.writeable = False
        return empty
    dtype = np.dtype(dtype)
    return np.frombuffer(buffer, dtype, count=length // dtype.itemsize, offset=spec.start).reshape(shape)


def _torch_view(buffer: mmap.mmap, spec: TensorSpec) -> Any:
    import torch

    length = spec.end - spec.start
    name = _TORCH.get(spec.dtype)
    dtype, shape = (torch.uint8, (length,)) if name is None else (getattr(torch, name), spec.shape)
    if length == 0:
        return torch.empty(shape, dtype=dtype)
    count = length // dtype.itemsize
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=spec.start).reshape(shape)


def _expect(connection: Connection, what: str) -> protocol.Message:
    try:
        message = connection.receive()
    except TimeoutError as exc:
        raise UnavailableError(f"the agent did not answer in time: {what}; try again or wait longer") from exc
    except (OSError, msgspec.MsgspecError) as exc:
        raise UnavailableError(f"the agent's answer can't be read: {what} ({exc})") from exc
    if message is None:
        raise UnavailableError(f"the agent ended the connection: {what}")
    if isinstance(message, Failed):
        raise protocol.error_of(message)
    return message


def open_model(
    name: str,
    *,
    framework: Literal["numpy", "torch"] = "numpy",
    version: str = "",
    timeout_s: float = 600.0,
    socket_path: str | Path | None = None,
) -> OpenModel:
    """Leases a model's weights from this node's agent and maps them; waits up to `timeout_s` seconds until they are
    ready.

    Raises:
        UsageError: the framework is not known or not installed.
        UnavailableError: no agent answers, or not in time.
        ModelNotFoundError, IntegrityError, NoRoomError: as the agent says.
    """
    if framework not in {"numpy", "torch"}:
        raise UsageError(f"framework {framework!r} is not known; use 'numpy' or 'torch'")
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise UsageError("torch is not installed in this environment: `pip install torch`, or open with framework='numpy'")
    if not 0 <= timeout_s < 1e7:
        raise UsageError(f"timeout_s={timeout_s} is no number of seconds to wait; give 0 or more")
    what = f"opening {name!r}"
    connection = protocol.connect(socket_path, timeout_s)
    fds: list[int] = []
    try:
        connection.send(Acquire(1, name, version, timeout_s))
        # The agent ends the wait itself; a little longer here, so that its own reason arrives.
        connection.sock.settimeout(timeout_s + 5)
        grant = _expect(connection, what)
        if not isinstance(grant, Granted):
            raise UnavailableError(f"the agent's answer is no answer: {what}")
        while len(fds) < len(grant.files):
            part = _expect(connection, what)
            if not isinstance(part, Descriptors):
                raise UnavailableError(f"the agent's answer is no answer: {what}")
            fds += connection.take_fds(part.count)
        return OpenModel(connection, grant, fds, framework)
    except (OSError, msgspec.MsgspecError) as exc:
        connection.close()
        raise UnavailableError(f"the agent went away: {what} ({exc})") from exc
    except BaseException:
        connection.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def ask(verb: Verb, model: str = "", *, version: str = "", timeout_s: float = 30.0, socket_path: str | Path | None = None) -> bytes:
    """Sends a control verb to this node's agent and returns its answer, JSON.

    Raises:
        UnavailableError: no agent answers.
        PrefetcherError: as the agent says.
    """
    connection = protocol.connect(socket_path, timeout_s)
    try:
        connection.send(Control(1, verb, model, version))
        reply = _expect(connection, verb)
    finally:
        connection.close()
    if not isinstance(reply, Reply):
        raise UnavailableError(f"the agent's answer is no answer: {verb}")
    return bytes(reply.body)
