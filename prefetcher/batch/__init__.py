"""Jobs at their time."""
