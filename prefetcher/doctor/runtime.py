"""The interpreter, compiled kernels, settings and GPUs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefetcher.config import Settings
from prefetcher.doctor.finding import Finding, fail, ok, warn
from prefetcher.words import size

__all__ = ["check_cuda", "check_kernels", "check_settings", "of_driver"]

#: Real seconds; a driver that hangs must not hang the check.
_CUDA_S = 20.0
#: Asked in a process of its own: what a driver allocates goes with it, and so does one that crashes.
_CUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
code = cuda.cuInit(0)
found, count, version = [], ctypes.c_int(), ctypes.c_int()
if not code:
    code = cuda.cuDeviceGetCount(ctypes.byref(count)) or cuda.cuDriverGetVersion(ctypes.byref(version))
    for number in range(count.value):
        name, device, total = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        found.append([name.value.decode(), total.value])
print(json.dumps({"code": code, "version": version.value, "devices": found}))
"""


def check_settings(settings: Settings) -> Finding:
    """Values that no role could work with, whatever the machine."""
    from prefetcher.config_check import of_values

    problems = of_values(settings)
    if problems:
        return fail("; ".join(problems), "`prefetcher config check` prints all settings as they take effect")
    changed = sum(len(getattr(settings, group).model_fields_set) for group in settings.model_fields_set)
    return ok(f"{changed} set, the others as they are by default")


def check_kernels(_settings: Settings) -> Finding:
    """Whether the core is compiled for this machine."""
    from prefetcher.compiling import compiled

    about = f"Python {platform.python_version()} on Linux {platform.release()} {platform.machine()}"
    if compiled():
        return ok(f"{about}; the core is compiled")
    return warn(f"{about}; the core is not compiled: the first start or replay takes half a minute longer", "prefetcher compile")


def check_cuda(_settings: Settings) -> Finding:
    """GPUs, as the driver tells them."""
    are_there = any(Path("/dev").glob("nvidia[0-9]*"))
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", _CUDA], capture_output=True, text=True, timeout=_CUDA_S, check=True)
        return of_driver(json.loads(done.stdout), are_there, find_spec("torch") is not None)
    except subprocess.TimeoutExpired:
        return of_driver(f"it did not answer within {_CUDA_S:.0f} s", are_there, False)
    except (OSError, ValueError, subprocess.SubprocessError):
        return of_driver("libcuda.so.1 can't be loaded", are_there, False)


def of_driver(told: Mapping[str, Any] | str, are_there: bool, has_torch: bool) -> Finding:
    """What is to be said of what the driver told, or of why it told nothing; `are_there` is whether the machine has devices for GPUs."""
    if isinstance(told, str):
        if are_there:
            return warn(f"there are GPUs, but no driver to ask: {told}", "install NVIDIA's driver, or give the container its libraries")
        return ok("no GPU: weights go as far as host memory")
    if told["code"] or not told["devices"]:
        if are_there:
            return warn(f"there are GPUs, but the driver gives none (error {told['code']})", "`nvidia-smi` says more")
        return ok("no GPU: weights go as far as host memory")
    kinds = ", ".join(f"{name} with {size(total)}" for name, total in told["devices"])
    found = f"{kinds}; CUDA {told['version'] // 1000}.{told['version'] % 1000 // 10}"
    if not has_torch:
        return warn(f"{found}; torch is not installed", "pip install 'prefetcher[cuda]' to open weights as tensors of a GPU")
    return ok(found)
