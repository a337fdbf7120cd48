"""Documented import paths; re-exports only."""
