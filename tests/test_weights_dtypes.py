"""Every dtype and shape of the format, as NumPy and torch see it through the lease socket, against the bytes of the file."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights_kit import MB, OneModelAgent, fill, serving

import prefetcher
from prefetcher.agent.headers import DTYPE_BITS
from prefetcher.agent.hostmem import HostArena
from prefetcher.agent.manifest import ModelSource, scan_models_folder, write_manifests
from prefetcher.errors import UsageError

#: By the format's name: what NumPy has of its own, and the unsigned integer that stands in for what it lacks.
NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
    "BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8", "F8_E8M0": "uint8", "F8_E4M3FNUZ": "uint8", "F8_E5M2FNUZ": "uint8",
}  # fmt: skip
TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
ML_DTYPES = {name: TORCH[name] for name, stand_in in NUMPY.items() if TORCH[name] != stand_in}
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
SHAPES = {"matrix": [6, 4], "scalar": [], "one": [1], "empty": [0], "hollow": [3, 0, 2], "deep": [1, 2, 1, 3, 1, 2]}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """By name: dtype, shape, bytes; in that order in the file, with nothing between, so that some begin at odd places."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def all_tensors() -> dict[str, tuple[str, list[int], bytes]]:
    rng = np.random.default_rng(7)
    tensors: dict[str, tuple[str, list[int], bytes]] = {"odd": ("U8", [3], b"abc")}
    for dtype, bits in DTYPE_BITS.items():
        for name, shape in SHAPES.items():
            if math.prod(shape) * bits % 8:
                continue
            size = math.prod(shape) * bits // 8
            raw = rng.integers(0, 2 if dtype == "BOOL" else 256, size, dtype=np.uint8).tobytes()
            tensors[f"{dtype}.{name}"] = (dtype, shape, raw)
    return tensors


TENSORS = all_tensors()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("dtypes")
    (folder / "models" / "zoo" / "part").mkdir(parents=True)
    write_safetensors(folder / "models" / "zoo" / "w.safetensors", TENSORS)
    write_safetensors(folder / "models" / "zoo" / "part" / "w.safetensors", {"odd": ("U8", [3], b"xyz")})
    write_manifests(folder / "models")
    source: ModelSource = scan_models_folder(folder / "models").source("zoo")
    arena = HostArena(64 * MB, name=f"dtypes-{os.getpid()}", lock="off")
    fill(arena, source)
    with serving(OneModelAgent(arena, source), folder) as path:
        yield path
    arena.close()


def test_every_dtype_and_shape_is_there(place: Path) -> None:
    assert {dtype for dtype, _, _ in TENSORS.values()} == set(DTYPE_BITS) == set(NUMPY) | set(PACKED)
    with prefetcher.open("zoo", socket_path=place) as tensors:
        assert set(tensors) == {*TENSORS, "part/odd"}
        assert tensors["part/odd"].tobytes() == b"xyz"  # a part's tensors carry its folder
        assert tensors.dtypes == {name: dtype for name, (dtype, _, _) in TENSORS.items()} | {"part/odd": "U8"}
        assert tensors.shapes == {name: tuple(shape) for name, (_, shape, _) in TENSORS.items()} | {"part/odd": (3,)}
        with pytest.raises(KeyError):
            tensors["nothing"]


@pytest.mark.parametrize("name", TENSORS)
def test_numpy_gives_the_bits_without_ml_dtypes(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    dtype, shape, raw = TENSORS[name]
    with prefetcher.open("zoo", socket_path=place) as tensors:
        array = tensors[name]
        assert isinstance(array, np.ndarray)
        assert array.tobytes() == raw
        assert not array.flags.writeable
        if dtype in PACKED:
            assert (array.dtype, array.shape) == (np.uint8, (len(raw),))
        else:
            assert (array.dtype.name, array.shape) == (NUMPY[dtype], tuple(shape))


@pytest.mark.parametrize("name", [n for n, (dtype, _, _) in TENSORS.items() if dtype in ML_DTYPES])
def test_numpy_gives_ml_dtypes_where_they_are_installed(name: str, place: Path) -> None:
    pytest.importorskip("ml_dtypes")
    dtype, shape, raw = TENSORS[name]
    with prefetcher.open("zoo", socket_path=place) as tensors:
        array = tensors[name]
        assert (array.dtype.name, array.shape) == (ML_DTYPES[dtype], tuple(shape))
        assert array.tobytes() == raw


@pytest.mark.parametrize("name", TENSORS)
def test_torch_gives_its_own_dtypes(name: str, place: Path) -> None:
    torch = pytest.importorskip("torch")
    dtype, shape, raw = TENSORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with prefetcher.open("zoo", framework="torch", socket_path=place) as tensors:
            tensor = tensors[name]
            if dtype in PACKED:
                assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (len(raw),))
            else:
                assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, TORCH[dtype]), tuple(shape))
            flat = tensor.reshape(-1)
            assert (flat.view(torch.uint8).numpy().tobytes() if len(raw) else b"") == raw


def test_what_torch_reads_equals_what_safetensors_gives(tmp_path: Path) -> None:
    """Numbers, not only bits: written by safetensors from torch's own tensors."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(3)
    values = torch.randn(64, 32, generator=generator)
    kinds = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
    (tmp_path / "models" / "zoo").mkdir(parents=True)
    file = tmp_path / "models" / "zoo" / "w.safetensors"
    save_file({str(kind): values.to(kind) for kind in kinds} | {"scalar": torch.tensor(2.5, dtype=torch.bfloat16)}, file)
    write_manifests(tmp_path / "models")
    source = scan_models_folder(tmp_path / "models").source("zoo")
    arena = HostArena(64 * MB, name=f"numbers-{os.getpid()}", lock="off")
    fill(arena, source)
    try:
        with serving(OneModelAgent(arena, source), tmp_path) as path:
            with prefetcher.open("zoo", framework="torch", socket_path=path) as tensors:
                for name, want in load_file(file).items():
                    assert tensors[name].dtype == want.dtype
                    assert torch.equal(tensors[name].to(torch.float32), want.to(torch.float32))
                assert tensors["scalar"].item() == 2.5
            with prefetcher.open("zoo", socket_path=path) as arrays:
                bits = arrays["torch.bfloat16"].view(np.uint16).astype(np.uint32) << 16
                assert np.array_equal(bits.view(np.float32), values.to(torch.bfloat16).to(torch.float32).numpy())
    finally:
        arena.close()


def test_an_unknown_framework_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'numpy' or 'torch'"):
        prefetcher.open("zoo", framework="jax", socket_path=tmp_path / "none")  # type: ignore[arg-type]


def test_opening_imports_neither_torch_nor_numpy_until_a_tensor_is_asked_for(place: Path) -> None:
    code = """
import sys, prefetcher
with prefetcher.open("zoo", socket_path=sys.argv[1]) as tensors:
    assert "numpy" not in sys.modules and "torch" not in sys.modules, "imported too early"
    tensors["odd"]
    assert "numpy" in sys.modules and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
