"""What a benchmark ran on: said beside every figure."""

from __future__ import annotations

import os
import platform

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, str | int | float]:
    """Cores, memory (GB) and the interpreter."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count() or 0,
        "memory_gb": round(memory / 1e9, 1),
        "python": platform.python_version(),
        "system": platform.machine(),
    }
