"""Errors of the analysis."""

from overlay.errors import IsthmusError


class AnalysisError(IsthmusError):
    """Traces that cannot be analysed, or an analysis that cannot be run; the message has the remedy."""
