"""A book of windows from a file, for replay and for tuning."""

from __future__ import annotations

import json
from pathlib import Path

from prefetcher.core.windows import WindowBook
from prefetcher.errors import InputError

__all__ = ["read_book"]


def read_book(path: Path) -> WindowBook:
    """The book of windows in a file of JSON. Raises InputError where there is none."""
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"can't be read as a book of windows: {error}; write one with prefetcher tune", path=str(path)) from error
    return WindowBook.from_json(said, str(path))
