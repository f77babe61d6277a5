"""From what nodes' ledgers wrote to a report over any window: what was waited, what was held, and what every prefetch came to."""
