"""`prefetcher demo`: real weights, two days of traffic in a minute or so, with and without prefetching."""
