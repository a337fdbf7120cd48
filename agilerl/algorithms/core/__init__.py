"""Documented import path; re-exports only."""
