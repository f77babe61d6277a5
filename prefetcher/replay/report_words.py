"""What the words in the report's tables mean, one line each. How each figure is computed to the byte is docs/replay.md's matter."""

from __future__ import annotations

__all__ = ["HOW_TO_READ"]

HOW_TO_READ: tuple[tuple[str, str], ...] = (
    ("waiting", "Seconds that requests waited for weights, added up; shown for an hour, the mean over the scored time."),
    ("cold starts", "Requests that found their model's weights neither in memory nor on the way, however short the wait."),
    ("p50, p95, p99", "Half, 95 % and 99 % of all scored requests wait no longer; those that did not wait are included."),
    ("GB held", "Memory taken by weights, the mean over the scored time."),
    ("GB idle", "The part of it after a model's last use, until it was given up."),
    ("GB wasted", "The part of it taken by weights that were fetched ahead and never used."),
    ("GB early", "Memory taken by weights that were fetched ahead, from being ready until their first use: what being in time costs."),
    ("GB moved in all", "Read from disk into memory in the scored time, for requests and ahead of them."),
    ("prefetches", "Loads that were started ahead of any request."),
    ("accuracy", "Of the prefetches whose fate is known, the share that a request used; a low one may pay where a wrong guess is cheap."),
    ("timeliness", "Of the prefetches that were used, the share that was ready before the request came."),
    ("coverage", "What fetching ahead alone saves: the share of waiting less than with the same decisions and no prefetch."),
    ("pollution", "Share of requests that miss a model which was given up here, and which would be there had nothing been prefetched."),
)
