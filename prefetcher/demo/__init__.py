"""`prefetcher demo`: real weights, two days of traffic in minutes, with and without prefetching."""

from __future__ import annotations

from pathlib import Path

__all__ = ["run"]


def run(out: Path, *, keep: bool = False) -> None:
    """Runs the demo; `out` gets `demo.html`, and with `keep` also both sides' logs and state. Raises PrefetcherError."""
    from prefetcher.demo.demo import run_demo

    run_demo(out, keep=keep)
