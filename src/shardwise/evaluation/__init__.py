"""Measuring a model: text windows for perplexity so far."""

from shardwise.evaluation.windows import Window, batch_windows, rolling_windows

__all__ = ["Window", "batch_windows", "rolling_windows"]
