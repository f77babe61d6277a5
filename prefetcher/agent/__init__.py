"""The node agent: brings weights into memory, verifies them, leases them to engines."""
