"""A run directory as one HTML page. It only reads files, and does not need torch."""

from agilerl.report.page import build_report

__all__ = ["build_report"]
