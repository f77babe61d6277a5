"""Replay of a request log through the production decision and its rivals, with a virtual clock."""
