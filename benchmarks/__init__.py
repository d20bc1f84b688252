"""Measurements behind the figures in docs/performance.md; each prints ratios of one run."""
