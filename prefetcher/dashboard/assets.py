"""The page's own files, as they are served: readable source, compressed once, each with an entity tag; and what the page may load.

Nothing is built and nothing comes from elsewhere, so the page works without a network. Covers no data.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["PAGE_HEADERS", "SCRIPTS", "Asset", "asset", "assets"]

#: The modules of the page, the one that starts first.
SCRIPTS = ("app.js", "net.js", "dom.js", "format.js", "charts.js", "worth.js", "now.js", "why.js", "wrong.js", "jobs.js")
_KINDS = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
#: Own files only, no frames, no forms that leave, no inline scripts or styles; it asks nobody but its own endpoint.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: as it is, and compressed."""

    plain: bytes
    gzipped: bytes
    kind: str
    tag: str


@cache
def asset(name: str) -> Asset:
    """The file of that name. Raises FileNotFoundError for any other than `assets` lists."""
    if name not in assets():
        raise FileNotFoundError(name)
    plain = (files("prefetcher.dashboard") / name).read_bytes()
    tag = f'"{hashlib.blake2b(plain, digest_size=12).hexdigest()}"'
    return Asset(plain, gzip.compress(plain, 9, mtime=0), _KINDS[name.rpartition(".")[2]], tag)


def assets() -> tuple[str, ...]:
    """All files of the page."""
    return ("page.html", "style.css", *SCRIPTS)
