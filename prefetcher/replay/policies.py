"""The policies that replay knows, by name: rivals as others run them, simple rivals with our rules, references that know the future."""

from __future__ import annotations

from dataclasses import replace

from prefetcher.core.demand import STANDARD_TAUS_S
from prefetcher.core.node import Policy, PrefetchRule, Rank
from prefetcher.errors import UsageError

__all__ = ["DEFAULT_POLICIES", "OURS", "check_one_tier", "known_policies", "parse_policy", "policy_in_words", "standard_taus"]

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
#: What each does in few words, in the order in which they are listed.
_IN_WORDS: dict[str, str] = {
    "lru": "makes room by giving up what was used longest ago",
    "gdsf": "gives up what is seldom used for its size (GreedyDual-Size-Frequency)",
    "lfu": "gives up what was used least often of late",
    "sieve": "gives up the oldest that was not used since it was last passed over (SIEVE)",
    "lhd": "gives up what promises the fewest hits for its bytes by its age (least hit density)",
    "ttl": "gives up what was not used for a fixed time",
    "hybrid": "learns how long each model is idle, and loads it again just before that ends (serverless pre-warming)",
    "belady": "knows the future: gives up what is used again last",
    "belady-size": "knows the future: gives up what is used again last, by size",
    "clairvoyant": "knows the future: fetches everything in time",
}
_SMITH_IN_WORDS = "; of waiting loads, the one with the most waiting requests a byte goes first"
_BYPASS_IN_WORDS = "; serves a model without keeping it where others are worth more"
_OURS_IN_WORDS = "this program: learned forecasts decide what is kept, what is served without being kept, and what is fetched ahead"


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
        *others, last = known_policies()
        raise UsageError(f"unknown policy {name!r}; known are {', '.join(others)} and {last}")
    if suffix == "" and not name.endswith("-"):
        return policy
    if suffix == "smith" and kind not in _WITHOUT_SMITH:
        return replace(policy, smith=True)
    if suffix == "smith-bypass" and kind in _WITH_BYPASS:
        return replace(policy, smith=True, as_set=True, bypass=True)
    *others, last = known_policies()
    raise UsageError(f"policy {name!r}: {base} has no variant {suffix!r}; known are {', '.join(others)} and {last}")


def check_one_tier(name: str) -> None:
    """Raises UsageError for a rival that is known for one tier of memory only: those that fetch by a rule of their own."""
    if parse_policy(name, standard_taus()).prefetch is not PrefetchRule.NONE:
        raise UsageError(f"policy {name!r} fetches by a rule for one tier of memory; leave it out of --policy, or leave out --tiers")


def known_policies() -> list[str]:
    """Every name that `parse_policy` takes, and ours; SECONDS stands for a number."""
    names = []
    for base in _IN_WORDS:
        with_number = f"{base}:SECONDS" if base in ("lfu", "ttl") else base
        names.append(with_number)
        names += [f"{with_number}-smith"] if base not in _WITHOUT_SMITH else []
        names += [f"{with_number}-smith-bypass"] if base in _WITH_BYPASS else []
    return [*names, OURS]


def policy_in_words(name: str) -> str:
    """What the policy called `name` does, in a few words; empty for a name that nobody knows."""
    if name == OURS:
        return _OURS_IN_WORDS
    bypass, smith = name.endswith("-smith-bypass"), "-smith" in name
    base = name.removesuffix("-bypass").removesuffix("-smith").partition(":")[0]
    if base not in _IN_WORDS:
        return ""
    return _IN_WORDS[base] + (_SMITH_IN_WORDS if smith else "") + (_BYPASS_IN_WORDS if bypass else "")


def standard_taus() -> list[float]:
    """A fresh list of the time constants that every demand keeps."""
    return list(STANDARD_TAUS_S)
