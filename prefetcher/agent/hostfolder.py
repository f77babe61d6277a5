"""Where the host tier's files lie, and how memory is allocated, locked and limited on this machine.

Covers the choice of a folder and everything that asks the kernel directly. In this order: the folder that was given;
our own mount (`OWN_MOUNT`); a private tmpfs with huge pages that no path leads to; a 0700 folder in /dev/shm; memory
files without names. The private one needs the right to make a user namespace and vanishes with the agent; it is
preferred to /dev/shm because 4 KiB pages halve the speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

from prefetcher.errors import BudgetError, LockLimitError, UsageError

__all__ = ["OWN_MOUNT", "HostFolder", "LockPolicy", "check_budget", "check_lock", "choose", "lock", "populate"]

LockPolicy = Literal["auto", "require", "off"]

#: Where an administrator mounts a tmpfs for us (`huge=within_size`).
OWN_MOUNT = Path("/run/prefetcher/host")

_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 0x2, 0x4, 0x10
_CAP_IPC_LOCK = 14

_libc = ctypes.CDLL(None, use_errno=True)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def populate(view: memoryview, start: int, end: int) -> None:
    """Faults in bytes [start, end) of a mapping without the interpreter's lock. Where the kernel can't, reads will."""
    _libc.madvise(ctypes.c_void_p(_address(view) + start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


def lock(view: memoryview) -> str | None:
    """Locks a mapping in memory; returns why not, or None."""
    if _libc.mlock(ctypes.c_void_p(_address(view)), ctypes.c_size_t(len(view))):
        return os.strerror(ctypes.get_errno())
    return None


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def check_budget(budget_bytes: int) -> None:
    """Raises BudgetError for a budget that is not positive or larger than the machine's memory."""
    total = _meminfo("MemTotal")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    if budget_bytes <= 0 or budget_bytes > total:
        raise BudgetError(
            f"a host budget of {budget_bytes / 1e9:g} GB cannot be honoured: this machine has {total / 1e9:.1f} "
            f"GB; give less"
        )


def _may_lock_anything() -> bool:
    found = re.search(r"^CapEff:\s+([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def check_lock(policy: LockPolicy, budget_bytes: int) -> str | None:
    """A standing warning where memory cannot be locked, else None.

    Raises:
        LockLimitError: the policy is `require` and the limit is below the budget.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if policy == "off" or _may_lock_anything() or limit in {resource.RLIM_INFINITY, -1} or limit >= budget_bytes:
        return None
    what = f"the limit of locked memory is {limit / 2**20:g} MiB and the host budget {budget_bytes / 2**20:g} MiB"
    if policy == "require":
        raise LockLimitError(f"{what}; raise it (`ulimit -l`, LimitMEMLOCK=) or use --lock auto")
    return f"weights are not locked in memory: {what}"


class HostFolder:
    """A folder of files by descriptor; `memfd` has no folder at all. `huge` says whether its pages are huge."""

    def __init__(
        self, kind: str, fd: int = -1, *, made: Path | None = None, huge: bool = False, lock_fd: int = -1
    ) -> None:
        self.kind = kind
        self.huge = huge
        self._fd = fd
        self._made = made
        self._lock_fd = lock_fd

    def make(self, name: str) -> None:
        if self._fd >= 0:
            os.mkdir(name, 0o700, dir_fd=self._fd)

    def create(self, folder: str, name: str) -> int:
        """A new empty file, open for reading and writing."""
        if self._fd < 0:
            return os.memfd_create(f"prefetcher-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def reopen(self, folder: str, name: str) -> int:
        path = f"{folder}/{name}"
        os.chmod(path, 0o600, dir_fd=self._fd)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)

    def seal(self, fd: int) -> None:
        """Nobody who gets the file from now on can write it."""
        if self._fd < 0:
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)
        else:
            os.fchmod(fd, 0o400)

    def rename(self, old: str, new: str) -> None:
        if self._fd >= 0 and old != new:
            os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Unlinks a folder and its files; what is gone already is no error."""
        if self._fd >= 0:
            shutil.rmtree(name, ignore_errors=True, dir_fd=self._fd)

    def leftovers(self) -> list[str]:
        """Names that an earlier agent left here."""
        return sorted(n for n in os.listdir(self._fd) if n != ".lock") if self._fd >= 0 else []

    def close(self) -> None:
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _own(path: Path, kind: str, *, remove_at_close: bool) -> HostFolder:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    lock_fd = -1
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise UsageError(f"{path} belongs to another user; name a folder of your own for the host tier")
        lock_fd = os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(lock_fd)
        os.close(fd)
        raise UsageError(f"another agent uses {path}; stop it, or name another folder for the host tier") from exc
    except UsageError:
        os.close(fd)
        raise
    return HostFolder(kind, fd, made=path if remove_at_close else None, huge=_is_huge(path), lock_fd=lock_fd)


def _is_huge(path: Path) -> bool:
    real = os.path.realpath(path)
    best, options = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, _, opts, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, options = point, opts
    return "huge=always" in options or "huge=within_size" in options


_MOUNT_HELPER = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        sys.exit(1)
    return result
uid, gid = os.getuid(), os.getgid()
def mount():
    fs = libc.syscall(ctypes.c_long(430), b"tmpfs", ctypes.c_uint(1))
    if fs < 0:
        return -1
    for key, value in ((b"huge", b"within_size"), (b"size", sys.argv[2].encode()), (b"mode", b"0700")):
        call(431, fs, ctypes.c_uint(1), key, value, 0)
    call(431, fs, ctypes.c_uint(6), None, None, 0)
    return call(432, fs, ctypes.c_uint(1), ctypes.c_uint(14))
fd = mount()
if fd < 0:
    if libc.unshare(0x10020000):
        sys.exit(1)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open("/proc/self/" + name, "w") as out:
            out.write(text)
    fd = mount()
    if fd < 0:
        sys.exit(1)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [fd])
"""


def _private(budget_bytes: int) -> HostFolder | None:
    """A tmpfs with huge pages reached only by its descriptor (fsopen, fsmount), or None where that is not allowed.

    A small process of its own makes it: only one without threads may enter a user namespace.
    """
    if not _huge_pages_work():
        return None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Room for the rounding of every file's end to a page, beside the budget.
        size = str(budget_bytes + (64 << 20))
        command = [sys.executable, "-I", "-S", "-c", _MOUNT_HELPER, str(theirs.fileno()), size]
        try:
            subprocess.run(command, pass_fds=[theirs.fileno()], timeout=30, check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            return None
        ours.settimeout(5)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    if not fds:
        return None
    # What fsmount gives is a mere place (O_PATH), which can't be listed.
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fds[0])
    finally:
        os.close(fds[0])
    return HostFolder("private", fd, huge=True)


def _huge_pages_work() -> bool:
    try:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return "[deny]" not in enabled


def choose(budget_bytes: int, given: Path | None, name: str) -> HostFolder:
    """The first place that serves. `name` keeps several agents of one user apart in /dev/shm.

    Raises:
        UsageError: the given folder can't be used.
        BudgetError: the given folder's filesystem is smaller than the budget.
    """
    if given is not None:
        try:
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _fits(given, budget_bytes):
                return _own(given, "given", remove_at_close=False)
        except OSError as exc:
            raise UsageError(f"{given} cannot hold the host tier ({exc.strerror}); name another folder") from exc
        raise BudgetError(f"{given} has no {budget_bytes / 1e9:g} GB; give a smaller budget or another folder")
    if OWN_MOUNT.is_mount() and os.access(OWN_MOUNT, os.W_OK) and _fits(OWN_MOUNT, budget_bytes):
        return _own(OWN_MOUNT, "mount", remove_at_close=False)
    private = _private(budget_bytes)
    shm = Path(f"/dev/shm/prefetcher-{os.getuid()}-{name}")
    if private is not None:
        _sweep(shm)
        return private
    with contextlib.suppress(OSError):
        if _fits(shm.parent, budget_bytes):
            shm.mkdir(mode=0o700, exist_ok=True)
            return _own(shm, "shm", remove_at_close=True)
    return HostFolder("memfd")


def _sweep(shm: Path) -> None:
    """Removes what an earlier agent left in /dev/shm before a private place was to be had, unless it still runs."""
    with contextlib.suppress(OSError, UsageError):
        _own(shm, "shm", remove_at_close=True).close()


def _fits(path: Path, budget_bytes: int) -> bool:
    room = os.statvfs(path)
    return room.f_blocks * room.f_frsize >= budget_bytes
