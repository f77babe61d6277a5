"""The policies that replay knows, by name: rivals as others run them, simple rivals with our rules, references that know the future."""

from __future__ import annotations

from dataclasses import replace

from prefetcher.core.demand import STANDARD_TAUS_S
from prefetcher.core.node import Policy, PrefetchRule, Rank
from prefetcher.errors import UsageError

__all__ = ["DEFAULT_POLICIES", "OURS", "parse_policy"]

OURS = "ours"
DEFAULT_POLICIES: tuple[str, ...] = ("lru", "gdsf", "lhd-smith", OURS)

_CLASSIC = Policy(Rank.LRU, smith=False, as_set=False, bypass=False, price_per_byte_s=0.0)
_BASE: dict[str, Policy] = {
    "lru": _CLASSIC,
    "gdsf": replace(_CLASSIC, rank=Rank.GDSF),
    "sieve": replace(_CLASSIC, rank=Rank.SIEVE),
    "lhd": replace(_CLASSIC, rank=Rank.LHD),
    "belady": replace(_CLASSIC, rank=Rank.NEXT_USE),
    "belady-size": replace(_CLASSIC, rank=Rank.NEXT_USE_BYTES),
    "hybrid": replace(_CLASSIC, idle_windows=True, prefetch=PrefetchRule.IDLE_WINDOW),
    "clairvoyant": replace(_CLASSIC, rank=Rank.NEXT_USE, prefetch=PrefetchRule.EARLIEST),
}
_WITHOUT_SMITH = ("hybrid", "clairvoyant", "ttl")
_WITH_BYPASS = ("lfu", "lhd", "belady")


def parse_policy(name: str, taus_s: list[float]) -> Policy:
    """The policy called `name`; a time constant that `taus_s` lacks is appended to it. Raises UsageError for an unknown name."""
    base, _, suffix = name.partition("-")
    if name.startswith("belady-size"):
        base, suffix = "belady-size", name[len("belady-size-") :]
    kind, _, number = base.partition(":")
    if kind in ("lfu", "ttl"):
        try:
            seconds = float(number)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise UsageError(f"policy {name!r}: {kind} takes seconds, as in {kind}:3600")
        if kind == "ttl":
            policy = replace(_CLASSIC, keep_alive_s=seconds)
        else:
            if seconds not in taus_s:
                taus_s.append(seconds)
            policy = replace(_CLASSIC, rank=Rank.LFU, tau=taus_s.index(seconds))
    elif base in _BASE:
        policy = _BASE[base]
    else:
        raise UsageError(
            f"unknown policy {name!r}; known are lru, gdsf, lfu:SECONDS, sieve, lhd, ttl:SECONDS, hybrid, belady, "
            "belady-size, clairvoyant and ours"
        )
    if suffix == "" and not name.endswith("-"):
        return policy
    if suffix == "smith" and kind not in _WITHOUT_SMITH:
        return replace(policy, smith=True)
    if suffix == "smith-bypass" and kind in _WITH_BYPASS:
        return replace(policy, smith=True, as_set=True, bypass=True)
    raise UsageError(f"policy {name!r}: {base} has no variant {suffix!r}")


def standard_taus() -> list[float]:
    """A fresh list of the time constants that every demand keeps."""
    return list(STANDARD_TAUS_S)
