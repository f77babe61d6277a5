"""Benchmarks behind `prefetcher bench`."""
