"""A real Chromium, sites for it on origins of their own, and servers that accept and say nothing.

`PREFETCHER_TEST_CHROMIUM` names a browser; else one on the path. Without any, what asks for it is skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["Silent", "Site", "browser", "complaints_of"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For a module: while it runs, its thread has an event loop that tests of others would stumble over."""
    from playwright.sync_api import sync_playwright

    named = os.environ.get("PREFETCHER_TEST_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium: `apt-get install chromium`, or name one with PREFETCHER_TEST_CHROMIUM")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers and root don't give.
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


def complaints_of(page: Page) -> list[str]:
    """Fills with what the page throws and nobody catches, from now on."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if "Uncaught" in message.text else None)
    return found


class Site:
    """Serves `pages`, by path, at `origin`; as localhost, so that it is another site than 127.0.0.1. `headers` go with each."""

    def __init__(self, pages: Mapping[str, str | bytes], headers: Mapping[str, str] | None = None) -> None:
        site = self

        class Serves(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                found = site.pages.get(path)
                self.send_response(404 if found is None else 200)
                kind = "text/javascript" if path.endswith(".js") else "text/html"
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if found is not None:
                    self.wfile.write(found.encode() if isinstance(found, str) else found)

            def log_message(self, *_: object) -> None:
                pass

        self.pages = dict(pages)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Serves)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.origin = f"http://localhost:{self._server.server_port}"

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Silent:
    """Accepts connections and reads what comes; answers nothing until `release`, which closes them all."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        self._asked: list[bytes] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._run(self._accept)

    def _run(self, target: Callable[..., Any], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                held, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(held)
            self._run(self._read, held)

    def _read(self, held: socket.socket) -> None:
        while True:
            try:
                said = held.recv(65536)
            except OSError:
                return
            if not said:
                return
            with self._changed:
                self._asked.append(said)
                self._changed.notify_all()

    def wait_for(self, words: bytes, timeout_s: float = 30.0) -> bytes:
        """What was asked, once `words` are in it. Nothing is answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in b"".join(self._asked), timeout_s), b"".join(self._asked)
            return b"".join(self._asked)

    def release(self) -> None:
        for held in self._held:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)
            held.close()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        # A blocked accept is only woken by a shutdown.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release()
        for thread in self._threads:
            thread.join(5.0)
