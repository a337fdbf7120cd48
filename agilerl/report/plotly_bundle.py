"""The drawing library of the report, as one piece of JavaScript. The one file that imports plotly."""

from plotly.offline import get_plotlyjs

__all__ = ["plotly_javascript"]


def plotly_javascript() -> str:
    """Return plotly.js, to be put into a page once; nothing is loaded from the network."""
    return str(get_plotlyjs())
