"""What an answer to an act by hand means, in words: what became of it, and what to do where it was refused.

The codes are the residency machine's (`core.residency`, `core.plans`) and stay as they are in JSON.
"""

from __future__ import annotations

__all__ = ["in_words"]

_OF_ACT: dict[tuple[str, str], str] = {
    ("pin", "resident"): "in memory, and kept until it is unpinned",
    ("pin", "observe"): "pinned and not loaded: this node only observes; it is loaded once it prefetches again",
    ("evict", "observe"): "it is not in memory: this node only observes and loads nothing",
    ("pin", "loading"): "loading, and kept until it is unpinned",
    ("load", "resident"): "in memory already; unused, it stays an hour",
    ("load", "loading"): "loading; unused, it stays an hour",
    ("load", "demanded"): "on its way already, for a program that waits for it",
    ("evict", "demanded"): "a program waits for it; try again once that has it and is done",
}
_WORDS: dict[str, str] = {
    "moving": "on its way already",
    "queued": "waiting for its turn already",
    "unpinned": "no longer pinned; what is forecast decides again",
    "pinned_by_plan": "no longer pinned by hand; the plan in force keeps it, and the next one, in a moment, leaves it to the decision",
    "cancelling": "its load is being stopped",
    "evicting": "its memory is being given back",
    "pinned_by_other": "another key pinned it, and that one alone unpins it",
    "pinned_by_others": "no longer pinned by this key; others still pin it",
    "tenant_cap": "its tenant holds as much of this node as it may beyond demand; unpin or close another model of its own",
    "not_pinned": "it is not pinned by hand, so nothing changed; `prefetcher evict` gives its memory back",
    "not_resident": "it is not in memory, so there is nothing to give back",
    "leased": "a program has it leased, that is, open; try again once that closed it",
    "pinned": "it is pinned; `prefetcher unpin` it first",
    "in_use": "another move of its weights needs this copy; try again in a moment",
    "too_large": "it is larger than --host-bytes; start `prefetcher up` with more",
    "does_not_fit": "it does not fit beside what is pinned; unpin another model, or start `prefetcher up` with more --host-bytes",
    "no_copy": "no copy of it can be read on this node; look after its folder and run `prefetcher manifest` on it",
    "old_version": "a newer version took its place while you asked; ask again",
    "unknown_model": "the node knows no such model any more; `prefetcher status` lists what is there",
    "unknown_weights": "the node knows no such model any more; `prefetcher status` lists what is there",
    "observe": "this node only observes and loads nothing; start `prefetcher up` without --observe",
    "no_such_tier": "this node has no memory for it; start `prefetcher up` with more --host-bytes",
}


def in_words(act: str, reason: str) -> str:
    """What `reason` means as the answer to `act`; one that is not known is given as it is."""
    return _OF_ACT.get((act, reason)) or _WORDS.get(reason) or reason.replace("_", " ") or "done"
