"""Memory for weights: how much there is, whether it can be locked, where it would lie, and the size of its pages."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from prefetcher.agent.hostfolder import OWN_MOUNT, can_be_private, check_lock, may_lock_anything
from prefetcher.config import Settings
from prefetcher.doctor.finding import Finding, fail, ok, warn
from prefetcher.errors import LockLimitError
from prefetcher.telemetry.memory import memory_limits
from prefetcher.words import size

__all__ = ["check_amount", "check_lock_limit", "check_pages", "check_place"]

#: Beside the weights: the agent's own, and the windows that loads read through.
_BESIDE_BYTES = 512 << 20
_SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def check_amount(settings: Settings) -> Finding:
    """The budget against the machine's memory and the control groups' limits."""
    budget = settings.node.host_bytes
    limits = memory_limits()
    tightest = min(limits, key=lambda limit: limit.bytes)
    left = min(limits, key=lambda limit: limit.left_bytes)
    found = f"{tightest.where} has {size(tightest.bytes)}, {size(left.left_bytes)} are left; the budget is {size(budget)}"
    if budget > tightest.bytes:
        return fail(found, f"lower PREFETCHER_NODE__HOST_BYTES, or raise the limit of {tightest.where}")
    if budget + _BESIDE_BYTES > tightest.bytes:
        return warn(found, f"leave {size(_BESIDE_BYTES)} beside the weights: lower PREFETCHER_NODE__HOST_BYTES")
    if budget + _BESIDE_BYTES > left.left_bytes:
        todo = "while an agent runs here and holds it, nothing is wrong; else end what takes it, or lower PREFETCHER_NODE__HOST_BYTES"
        return warn(found, todo)
    return ok(found)


def check_lock_limit(settings: Settings) -> Finding:
    """Whether weights can be locked in memory, as the settings want it."""
    policy, budget = settings.node.lock, settings.node.host_bytes
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "without limit" if limit == resource.RLIM_INFINITY or may_lock_anything() else size(limit)
    found = f"may lock {words} (PREFETCHER_NODE__LOCK is {policy})"
    todo = f"raise it above {size(budget)}: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 of a container"
    try:
        problem = check_lock(policy, budget)
    except LockLimitError:
        return fail(found, todo)
    return warn(f"{found}: under pressure the kernel may swap weights out", todo) if problem else ok(found)


def check_place(settings: Settings) -> Finding:
    """Where weights would lie: the folder that is set, a mount of ours, a private tmpfs, /dev/shm, or nameless files."""
    budget, given = settings.node.host_bytes, settings.node.host_dir
    if given is not None:
        there = next(path for path in (given.absolute(), *given.absolute().parents) if path.exists())
        return _of_folder(there, budget, f"{given}, as PREFETCHER_NODE__HOST_DIR says")
    if OWN_MOUNT.is_mount() and os.access(OWN_MOUNT, os.W_OK):
        return _of_folder(OWN_MOUNT, budget, f"the mount {OWN_MOUNT}")
    if can_be_private(budget):
        return ok("a private tmpfs with huge pages, which ends with the agent")
    mount = f"mount -t tmpfs -o huge=within_size,mode=0700,uid=$UID,size={budget + (64 << 20)} tmpfs {OWN_MOUNT}"
    todo = f"allow user namespaces, or give it a tmpfs with huge pages: {mount}"
    shm = Path("/dev/shm")
    if shm.is_dir() and _room(shm) >= budget:
        return warn("/dev/shm, with pages of 4 KiB: loads take up to twice as long", todo)
    return warn("files without names, with pages of 4 KiB: loads take up to twice as long, and nothing outlives the agent", todo)


def _of_folder(folder: Path, budget: int, words: str) -> Finding:
    room = _room(folder)
    if room < budget:
        return fail(f"{words}, has {size(room)}; the budget is {size(budget)}", f"remount it with size={budget + (64 << 20)}")
    return ok(f"{words}, with {size(room)}")


def _room(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_blocks * stat.f_frsize


def check_pages(_settings: Settings) -> Finding:
    """Whether the kernel gives huge pages to files in memory at all."""
    try:
        modes = _SHMEM.read_text().strip()
    except OSError:
        todo = "take one with CONFIG_TRANSPARENT_HUGEPAGE"
        return warn("this kernel has no huge pages for files in memory: loads take up to twice as long", todo)
    chosen = modes.partition("[")[2].partition("]")[0]
    if chosen == "deny":
        return warn("huge pages for files in memory are denied: loads take up to twice as long", f"echo advise > {_SHMEM}")
    return ok(f"huge pages for files in memory: {chosen}; our own mounts ask for them")
