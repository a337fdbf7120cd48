"""Models: the frozen base, adapter slots on it, their optimizer, and the embedded default."""
