"""Connectors: streams, state and weights behind the ports of `prefetcher.ports`."""
