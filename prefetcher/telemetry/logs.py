"""Structured logs: a stable event name and facts in fields; human in a terminal, JSON in services. Written to standard error.

`configure` is called by the command line alone; every other module asks `log()` for a logger and sets nothing up.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

__all__ = ["configure", "log"]


def log() -> Any:
    """A logger; its methods take an event name and facts as keyword arguments."""
    return structlog.get_logger()


def configure(level: str = "info", style: str = "auto") -> None:
    """Sets logging up for this process. `style`: `human`, `json`, or `auto` (human where standard error is a terminal)."""
    human = style == "human" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
