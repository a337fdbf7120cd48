"""A run directory as one HTML page. Reads files only, and needs no torch."""

from agilerl.report.page import build_report

__all__ = ["build_report"]
