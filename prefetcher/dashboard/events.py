"""Server-sent events: the overview to every open page, a second after it changed, on connections that end when the server does.

The stream is read with `fetch`, so that a key can go into a header, as everywhere. Covers no making of overviews (`overview`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from prefetcher.errors import TemporaryError, UnavailableError

__all__ = ["Events"]

#: Real seconds between looks, and between signs of life where nothing changed: proxies end what is silent for a minute or half of one.
_LOOK_S = 1.0
_ALIVE_S = 10.0
#: Open pages; each costs a task and a socket.
_MOST = 200
#: What a page waits before it comes again.
_RETRY_MS = 2_000


class Events:
    """`make` gives what is told; it runs in a thread, and must be cheap for many. `close` ends all streams."""

    def __init__(self, make: Callable[[], dict[str, Any]], most: int = _MOST) -> None:
        self._make = make
        self._most = most
        self._open: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._guard = threading.Lock()
        self._closed = False

    @property
    def open(self) -> int:
        """Streams at this moment."""
        return len(self._open)

    def close(self) -> None:
        """Ends all streams, from any thread: a server that stops waits for its answers."""
        with self._guard:
            self._closed = True
            for event, loop in self._open.items():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(event.set)

    def stream(self, more: dict[str, Any]) -> AsyncIterator[bytes]:
        """The bytes of one stream; `more` is told beside each overview. Raises UnavailableError where there are too many."""
        over = asyncio.Event()
        with self._guard:
            if self._closed or len(self._open) >= self._most:
                raise UnavailableError(f"{len(self._open)} pages are open already; close some", retry_after_s=10.0)
            self._open[over] = asyncio.get_running_loop()
        return self._tell(over, more)

    async def _tell(self, over: asyncio.Event, more: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            yield f"retry: {_RETRY_MS}\n\n".encode()
            before, silent_s = b"", 0.0
            while not over.is_set():
                name, told = await self._now()
                body = msgspec.json.encode(told | more)
                if body != before or silent_s >= _ALIVE_S:
                    before, silent_s = body, 0.0
                    yield b"event: " + name + b"\ndata: " + body + b"\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), _LOOK_S)
                silent_s += _LOOK_S
            yield b"event: end\ndata: {}\n\n"
        finally:
            with self._guard:
                self._open.pop(over, None)

    async def _now(self) -> tuple[bytes, dict[str, Any]]:
        try:
            return b"overview", await run_in_threadpool(self._make)
        except TemporaryError as exc:
            return b"away", {"why": str(exc)}
