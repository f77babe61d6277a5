"""Cold seconds against GB·h held: points, the lower convex hull of one policy's, and reading it at another's GB·h."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["FrontierPoint", "HullReading", "knows_future", "least_gb_h", "lower_hull", "read_hull"]


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One run: what was held (GB·h) and what it cost in waiting (cold seconds), both of the scored time.

    `price` is the seconds of waiting that a GB held for an hour was worth in this run; None where the policy has no
    price.
    """

    policy: str
    held_gb_h: float
    cold_seconds: float
    price: float | None = None


@dataclass(frozen=True, slots=True)
class HullReading:
    """Cold seconds read from a hull; `outside` when the GB·h lie beyond its ends and the nearer end was taken."""

    cold_seconds: float
    outside: bool


def knows_future(policy: str) -> bool:
    """Whether a policy of this name decides with knowledge of later rows: a reference that can't be run."""
    return policy.startswith(("belady", "clairvoyant"))


def lower_hull(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """The lower convex hull by rising GB·h, from least held to fewest cold seconds; beyond, more buys nothing."""
    hull: list[FrontierPoint] = []
    for point in sorted(set(points), key=lambda p: (p.held_gb_h, p.cold_seconds, p.price or 0.0)):
        if hull and point.cold_seconds >= hull[-1].cold_seconds:
            continue
        while hull and (hull[-1].held_gb_h == point.held_gb_h or (len(hull) > 1 and _above(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    return hull


def _above(left: FrontierPoint, middle: FrontierPoint, right: FrontierPoint) -> bool:
    """Whether `middle` lies on or above the line from `left` to `right`."""
    rise = (right.cold_seconds - left.cold_seconds) * (middle.held_gb_h - left.held_gb_h)
    return (middle.cold_seconds - left.cold_seconds) * (right.held_gb_h - left.held_gb_h) >= rise


def read_hull(hull: Sequence[FrontierPoint], held_gb_h: float) -> HullReading:
    """Cold seconds at `held_gb_h`, interpolated linearly between the hull's points. Raises ValueError for an empty
    hull.
    """
    if not hull:
        raise ValueError("a hull without points cannot be read")
    if held_gb_h <= hull[0].held_gb_h:
        return HullReading(hull[0].cold_seconds, held_gb_h < hull[0].held_gb_h)
    for left, right in pairwise(hull):
        if held_gb_h <= right.held_gb_h:
            share = (held_gb_h - left.held_gb_h) / (right.held_gb_h - left.held_gb_h)
            return HullReading(left.cold_seconds + share * (right.cold_seconds - left.cold_seconds), False)
    return HullReading(hull[-1].cold_seconds, held_gb_h > hull[-1].held_gb_h)


def least_gb_h(hull: Sequence[FrontierPoint], cold_seconds: float) -> float | None:
    """The least GB·h at which the hull waits no more than `cold_seconds`; None where it never does."""
    if not hull or hull[-1].cold_seconds > cold_seconds:
        return None
    if hull[0].cold_seconds <= cold_seconds:
        return hull[0].held_gb_h
    for left, right in pairwise(hull):
        if right.cold_seconds <= cold_seconds:
            share = (left.cold_seconds - cold_seconds) / (left.cold_seconds - right.cold_seconds)
            return left.held_gb_h + share * (right.held_gb_h - left.held_gb_h)
    return None
