"""A process of the program: its threads, its HTTP endpoint, and ending all of it in order.

What is started is stopped in the opposite order, whatever happens between. A part that dies ends the process with its reason: better
started again by whoever runs it than healthy and deaf. Covers no parts (`app`).
"""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from prefetcher.errors import TemporaryError, UnavailableError
from prefetcher.telemetry.logs import log

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

__all__ = ["Process", "listen", "settle_memory"]

_BACKLOG = 2048


class Process:
    """Parts and how they end. `stop` may be called at any point and twice."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._stop = threading.Event()
        self._closing: list[tuple[str, Callable[[], None]]] = []
        #: Why the process ended by itself, '' while it did not.
        self.failure = ""

    def closes(self, name: str, close: Callable[[], None]) -> None:
        """`close` is called when the process ends, before what was named before it."""
        self._closing.append((name, close))

    def has(self, name: str) -> bool:
        """Whether a part of this name was started."""
        return any(name == started for started, _ in self._closing)

    def run_thread(self, name: str, run: Callable[[threading.Event], None]) -> None:
        """Runs `run(stop)` in a thread of its own; an error in it ends the process."""
        stop = threading.Event()

        def run_or_end() -> None:
            try:
                run(stop)
            except BaseException as exc:
                self.part_died(name, exc)
                raise

        thread = threading.Thread(target=run_or_end, name=name)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join()

        self.closes(name, end)

    def part_died(self, name: str, error: BaseException) -> None:
        """Without this part the process must not look healthy: it ends."""
        self.failure = f"the {name} stopped: {error!r}; its log has more; start `prefetcher {self._command}` again"
        log().error("part_died", part=name, reason=repr(error))
        self.ask_to_stop()

    def serve(self, endpoint: Starlette, listener: socket.socket) -> str:
        """Serves `endpoint` in a thread; its address."""
        import uvicorn

        config = uvicorn.Config(
            endpoint,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
        thread.start()
        self.closes("endpoint", lambda: _end_server(server, thread))
        host, port = listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def wait(self) -> None:
        """Returns when `ask_to_stop` was called."""
        self._stop.wait()

    def ask_to_stop(self) -> None:
        """May be called from a signal handler."""
        self._stop.set()

    def stop(self) -> None:
        """Stops every part that was started, the last one first; one that fails doesn't keep the others from it."""
        while self._closing:
            name, close = self._closing.pop()
            try:
                close()
            except (OSError, TemporaryError) as exc:
                log().error("not_stopped_cleanly", part=name, reason=str(exc))


def _end_server(server: uvicorn.Server, thread: threading.Thread) -> None:
    server.should_exit = True
    thread.join(10.0)


def settle_memory() -> None:
    """What a started process has, it keeps: the garbage collector looks through it no more. Its pauses get shorter, and cycles that come
    later are found sooner, so that memory stays flat."""
    gc.collect()
    gc.freeze()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        UnavailableError: another program has the port, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches the delay of small packets off only for sockets that name their protocol: 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, TypeError) as exc:  # TypeError: no name can be encoded so
        listener.close()
        reason = exc.strerror if isinstance(exc, OSError) else "it is no name"
        raise UnavailableError(f"can't listen on {host} port {port}: {reason}; give another one with --port") from exc
    return listener
