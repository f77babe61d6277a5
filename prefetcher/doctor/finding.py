"""What a check says: how it is, what was found, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Level", "fail", "ok", "warn"]

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """`warn`: it works, and less well than it could; `fail`: some role will not start, or loses something. `todo` '': nothing."""

    level: Level
    found: str
    todo: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, todo: str) -> Finding:
    return Finding("warn", found, todo)


def fail(found: str, todo: str) -> Finding:
    return Finding("fail", found, todo)
