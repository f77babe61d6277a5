"""How sizes, times, reasons and experts are put to people: in `prefetcher status`, the demo, and messages.

The codes stay as they are in JSON, metrics and logs; acts by hand have words of their own (`api.acts`).
"""

from __future__ import annotations

__all__ = ["count", "expert", "printable", "reason", "size", "span"]

_REASONS: dict[str, str] = {
    # why a prefetch was not ordered (`controller.planning`)
    "victims_worth_more": "what would have to leave is worth more",
    "hint_unlikely": "others would have to leave for a hint that is unlikely to be kept",
    "below_price": "holding it costs more than it saves",
    "too_early": "its use is expected later than its window allows for",
    "no_room": "what is in use or pinned leaves no room",
    "link_busy": "the disk was busy",
    "link_budget": "the disk had no time left",
    "expert_without_prefetch": "what decides does not prefetch",
    "left_to_hints": "hints say in time when it is used",
    "went_unused_before": "it went unused the last time",
    # why an order ended, or was refused
    "too_large": "it is larger than --host-bytes",
    "does_not_fit": "it does not fit beside what is pinned",
    "tenant_cap": "its tenant holds as much of the node as it may beyond demand",
    "hold": "nobody used it in its time",
    "window": "the batch job's time was over",
    "batch_ended": "only a batch job that is over asked for it",
    "room": "its memory was needed",
    "price": "holding it cost more than it saved",
    "asked": "evicted by hand",
    "still_mapped": "a program still maps the copy that is to leave",
    "bad": "its bytes are not those of its manifest",
    "gone": "its memory was taken away",
    "overdue": "it did not answer in time",
    "newer_plan": "a newer plan does without it",
    "newer_version": "a newer version took its place",
    "version": "a newer version took its place",
    "old_version": "a newer version took its place",
    "deadline": "its time ran out before its turn came",
    "restarted": "the node was started again",
    "switched_off": "prefetching was switched off",
    "plan": "the plan does without prefetching",
    "observe": "this node only observes",
    "stalled": "its load made no progress",
    "load_failed": "its load failed",
    "no_copy": "its files can't be read",
    "unknown_weights": "the node knows no such model any more",
    "control_group": "this hour measures what happens without prefetching",
    "resident": "it was there already",
    "moving": "it was on its way already",
    "queued": "it was ordered already",
    "demanded": "somebody waited for it already",
    "bypass": "read from disk: keeping it did not pay",
    # why a model is still in the store (`agent.fetching`)
    "model_slot": "other nodes fetch it just now",
    "cluster_slot": "as many models are fetched as the cluster may at a time",
    "store_busy": "the store asked to wait",
    "store_away": "the store does not answer",
    "store_refuses": "the store refuses this node's credentials",
    "bad_in_store": "its bytes in the store are not those of its manifest",
    "changed_in_store": "it was published again meanwhile",
    "disk_full": "the disk has no room for it",
    "fetch_failed": "it could not be fetched",
}
_EXPERTS: dict[str, str] = {
    "hazard-prefetch": "keeps and prefetches by learned chances of use over minutes to an hour",
    "hazard": "keeps by learned chances of use over minutes to an hour, without prefetching",
    "hazard-mix-prefetch": "keeps and prefetches by learned chances of use over minutes to an hour and recent rates together",
    "hazard-mix-10min-prefetch": "keeps and prefetches by the learned chance of use within 10 min and recent rates together",
    "hazard-prefetch-2min": "keeps by learned chances of use over minutes to an hour, prefetches by that within 2 min",
    "hazard-60min-prefetch": "keeps by the learned chance of use within an hour, prefetches by that within 10 min",
    "lhd": "keeps by hit density, without prefetching",
    "mix": "keeps by the rates of the last minutes to the last day together, without prefetching",
    "lfu-1h": "keeps by how often models were used in the last hour, without prefetching",
    "lfu-1d": "keeps by how often models were used in the last day, without prefetching",
    "lfu-7d": "keeps by how often models were used in the last week, without prefetching",
}


def reason(code: str) -> str:
    """What a reason means; one that is not known is given as it is."""
    return _REASONS.get(code) or code.replace("_", " ")


def printable(text: str) -> str:
    """`text` with all that is no character to look at as an escape (`\\x1b`): a name may hold codes that a terminal obeys."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def expert(name: str) -> str:
    """What an expert of `core.experts` does, '' for one that is not known."""
    return _EXPERTS.get(name, "")


def count(number: int, one: str, many: str = "") -> str:
    """`1 request`, `1,200 requests`; `many` where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count:.0f} B"


def span(seconds: float) -> str:
    """A length of time with a unit."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
