"""How well every predictor foresees starts, on a log of one's own."""
