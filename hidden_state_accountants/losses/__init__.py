"""Losses whose gradient is bounded and smooth: what a clip would do, without its curvature."""
