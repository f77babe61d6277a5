"""Decisions, pure: no I/O, no clock, no asyncio. Time comes in as `now_s`, randomness as a seeded generator."""
