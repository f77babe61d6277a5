"""Predictive prefetch of model weights: what a user's program imports.

`prefetcher.open("llama-70b")` maps a model's weights from the node agent without a copy. Everything else is the application behind the
`prefetcher` command. Importing this package imports nothing heavy.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "open"]


def __getattr__(name: str) -> object:
    if name == "open":
        from prefetcher.agent.client import open_model

        return open_model
    raise AttributeError(f"module 'prefetcher' has no attribute {name!r}")
