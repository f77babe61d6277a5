"""How much memory this machine, and the control groups around this process, have and have left. Reads /proc and /sys, changes nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryLimit", "available_bytes", "memory_limits"]

_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A bound on memory: `where` it comes from, how much it allows, and how much of that is left without swapping."""

    where: str
    bytes: int
    left_bytes: int


def memory_limits() -> list[MemoryLimit]:
    """The machine's own first, then those of the control groups that set one."""
    machine = _meminfo()
    return [MemoryLimit("this machine", machine.get("MemTotal", 0), machine.get("MemAvailable", 0)), *_of_groups()]


def available_bytes() -> int:
    """The least that any of them has left."""
    return min(limit.left_bytes for limit in memory_limits())


def _meminfo() -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {name: int(count) * 1024 for name, count in found}


def _of_groups() -> Iterator[MemoryLimit]:
    paths: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                paths.append(f"{controllers}{path}")
    groups: dict[Path, None] = {}
    for path in paths or [""]:
        own = _GROUPS / path.lstrip("/")
        # Inside of a container the path is often that of its host, and its own group is at the top.
        groups |= dict.fromkeys(group for group in (own, *own.parents) if group == _GROUPS or _GROUPS in group.parents)
    for group in groups:
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit: "max"
            limit, used = _group(group)
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cache = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
            # A limit of the older kind that is none is larger than any memory.
            if limit < 1 << 60:
                yield MemoryLimit(f"the control group {group}", limit, max(0, limit - used + cache))


def _group(group: Path) -> tuple[int, int]:
    if (group / "memory.max").exists():
        return int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
    return int((group / "memory.limit_in_bytes").read_text()), int((group / "memory.usage_in_bytes").read_text())
