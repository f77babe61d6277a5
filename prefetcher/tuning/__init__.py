"""Windows tuned over a log: the walk through it, the command `prefetcher tune`, its table and its page."""
