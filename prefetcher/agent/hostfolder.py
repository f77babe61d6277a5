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
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from prefetcher.errors import BudgetError, LockLimitError, UsageError

__all__ = [
    "OWN_MOUNT",
    "HostFolder",
    "LockPolicy",
    "allow_files",
    "can_be_private",
    "check_budget",
    "check_lock",
    "choose",
    "lock",
    "may_lock_anything",
    "populate",
    "punch",
]

LockPolicy = Literal["auto", "require", "off"]

#: Where an administrator mounts a tmpfs for us (`huge=within_size`).
OWN_MOUNT = Path("/run/prefetcher/host")

_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
#: Holes end on the boundary of a huge page: of a page that they share with what stays, nothing is given back.
_HUGE_PAGE_BYTES = 2 << 20
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1033, 0x2, 0x4, 0x10
_CAP_IPC_LOCK = 14
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: What this program calls the folders of copies, whole and half-loaded; all else in a folder is somebody else's.
_OURS = re.compile(r"[0-9a-f]{24}|\.\d+\.loading")

_libc = ctypes.CDLL(None, use_errno=True)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def populate(view: memoryview, start: int, end: int) -> None:
    """Faults in bytes [start, end) of a mapping without the interpreter's lock. Where the kernel can't, reads will."""
    _libc.madvise(ctypes.c_void_p(_address(view) + start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


def punch(fd: int, start: int, end: int) -> str | None:
    """Gives the memory of a file's bytes from `start` to its `end` back, which read as zeros then; returns why not, or None."""
    length = -(-end // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES - start
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(start), ctypes.c_int64(length)):
        return os.strerror(ctypes.get_errno())
    return None


def lock(view: memoryview) -> str | None:
    """Locks a mapping in memory; returns why not, or None."""
    if _libc.mlock(ctypes.c_void_p(_address(view)), ctypes.c_size_t(len(view))):
        return os.strerror(ctypes.get_errno())
    return None


def _meminfo(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _memory_limits() -> Iterator[int]:
    """The machine's memory and the limits of the control groups around this process, as far as they can be read."""
    yield _meminfo("MemTotal")
    root = Path("/sys/fs/cgroup")
    groups: list[tuple[Path, str]] = [(root, "memory.max"), (root / "memory", "memory.limit_in_bytes")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in {"", "memory"}:
                top, name = groups[1] if controllers else groups[0]
                own = top / path.lstrip("/")
                groups += [(group, name) for group in (own, *own.parents) if group.is_relative_to(top)]
    for group, name in groups:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            yield int((group / name).read_text())


def check_budget(budget_bytes: int) -> None:
    """Raises BudgetError for a budget that is not positive or larger than the memory that this process may have."""
    total = min(_memory_limits())
    if budget_bytes <= 0 or budget_bytes > total:
        raise BudgetError(
            f"a host budget of {budget_bytes / 1e9:g} GB cannot be honoured: this machine gives {total / 1e9:.1f} GB; "
            f"give less with --host-bytes"
        )


def allow_files() -> None:
    """Raises this process's limit of open files as far as it may: every shard in memory is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    """A folder of files by descriptor; `memfd` has no folder at all. `huge` says whether its pages are huge.

    `view` is the same folder through a mount that can only be read, where there is one: what is opened there can't be written by anybody.
    `path` is where other programs find it, if they do.
    """

    def __init__(
        self,
        kind: str,
        fd: int = -1,
        *,
        path: Path | None = None,
        made: Path | None = None,
        huge: bool = False,
        lock_fd: int = -1,
        view: int = -1,
    ) -> None:
        self.kind = kind
        self.huge = huge
        self.path = path
        self._fd = fd
        self._made = made
        self._lock_fd = lock_fd
        self._view = view

    def make(self, name: str) -> None:
        if self._fd >= 0:
            os.mkdir(name, 0o700, dir_fd=self._fd)

    def create(self, folder: str, name: str) -> int:
        """A new empty file, open for reading and writing."""
        if self._fd >= 0:
            return os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        first = os.memfd_create(f"prefetcher-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # The first descriptor of a memory file is not counted as a writer, so that no write lease would ever be granted on it.
            return os.open(f"/proc/self/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(first)

    def open_for_client(self, fd: int, folder: str, name: str) -> int:
        """A descriptor of the file `fd` that can only be read."""
        if self._view >= 0:
            return os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._view)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

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
        """Names of copies that an earlier agent left here. Whatever else lies here is left alone."""
        return sorted(n for n in os.listdir(self._fd) if _OURS.fullmatch(n)) if self._fd >= 0 else []

    def close(self) -> None:
        for fd in (self._view, self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def _own(path: Path, kind: str, *, remove_at_close: bool) -> HostFolder:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    lock_fd = -1
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise UsageError(f"{path} belongs to another user; name one of your own with --host-dir")
        lock_fd = os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(lock_fd)
        os.close(fd)
        raise UsageError(f"another agent uses {path}; stop it, or give this one another --host-dir or PREFETCHER_NODE__NAME") from exc
    except UsageError:
        os.close(fd)
        raise
    made = path if remove_at_close else None
    return HostFolder(kind, fd, path=path.absolute(), made=made, huge=_is_huge(path), lock_fd=lock_fd)


def _mount_of(path: Path) -> tuple[str, str]:
    """The kind of filesystem that a path is on, and its mount options."""
    real = os.path.realpath(path)
    best, found = "", ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, found = point, (kind, options)
    return found


def _is_huge(path: Path) -> bool:
    options = _mount_of(path)[1]
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
fds = [fd]
view = libc.syscall(ctypes.c_long(428), fd, b"", ctypes.c_uint(0x1000 | 1 | os.O_CLOEXEC))
only_read = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
if view >= 0 and not libc.syscall(ctypes.c_long(442), view, b"", ctypes.c_uint(0x1000), only_read, ctypes.c_size_t(32)):
    fds.append(view)
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], fds)
"""


def _private(budget_bytes: int) -> HostFolder | None:
    """A tmpfs with huge pages reached only by its descriptor (fsopen, fsmount), or None where that is not allowed.

    Where the kernel can copy such a mount (open_tree), clients get their files from a copy that can only be read. A small process of its
    own makes it: only one without threads may enter a user namespace.
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
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
    # What fsmount gives is a mere place (O_PATH), which can't be listed.
    try:
        opened = [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)
    if not opened:
        return None
    return HostFolder("private", opened[0], huge=True, view=opened[1] if len(opened) > 1 else -1)


def can_be_private(budget_bytes: int) -> bool:
    """Whether a tmpfs with huge pages of our own is to be had here. It is made, and vanishes at once."""
    made = _private(budget_bytes)
    if made is not None:
        made.close()
    return made is not None


def may_lock_anything() -> bool:
    """Whether this process is above the limit of locked memory (CAP_IPC_LOCK)."""
    return _may_lock_anything()


def _huge_pages_work() -> bool:
    try:
        enabled = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return "[deny]" not in enabled


def choose(budget_bytes: int, given: Path | None, name: str, *, with_path: bool = False) -> HostFolder:
    """The first place that serves. `name` keeps several agents of one user apart in /dev/shm. `with_path`: only a place that a path leads
    to.

    Raises:
        UsageError: the given folder can't be used, or is not in memory; or there is no place with a path.
        BudgetError: the given folder's filesystem is smaller than the budget.
    """
    if given is not None:
        try:
            there = next(path for path in (given.absolute(), *given.absolute().parents) if path.exists())
            kind = _mount_of(there)[0]
            if kind not in _IN_MEMORY:
                raise UsageError(f"{given} is on {kind}, not in memory; name a folder on a tmpfs with --host-dir, or none")
            if not _fits(there, budget_bytes):
                raise BudgetError(
                    f"{given} has no {budget_bytes / 1e9:g} GB; give less with --host-bytes, or another folder with --host-dir"
                )
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _own(given, "given", remove_at_close=False)
        except OSError as exc:
            raise UsageError(f"{given} cannot hold the host tier ({exc.strerror}); name another folder with --host-dir") from exc
    if OWN_MOUNT.is_mount() and os.access(OWN_MOUNT, os.W_OK) and _fits(OWN_MOUNT, budget_bytes):
        return _own(OWN_MOUNT, "mount", remove_at_close=False)
    private = None if with_path else _private(budget_bytes)
    shm = Path(f"/dev/shm/prefetcher-{os.getuid()}-{name}")
    if private is not None:
        _sweep(shm)
        return private
    with contextlib.suppress(OSError):
        if _fits(shm.parent, budget_bytes):
            shm.mkdir(mode=0o700, exist_ok=True)
            return _own(shm, "shm", remove_at_close=True)
    if with_path:
        raise UsageError(
            f"engines can be given paths only where host memory has one, and {shm.parent} is too small or can't be written: "
            f"mount a tmpfs at {OWN_MOUNT}, or name a folder on one with --host-dir"
        )
    return HostFolder("memfd")


def _sweep(shm: Path) -> None:
    """Removes what an earlier agent left in /dev/shm before a private place was to be had, unless it still runs."""
    with contextlib.suppress(OSError, UsageError):
        _own(shm, "shm", remove_at_close=True).close()


def _fits(path: Path, budget_bytes: int) -> bool:
    room = os.statvfs(path)
    return room.f_blocks * room.f_frsize >= budget_bytes
