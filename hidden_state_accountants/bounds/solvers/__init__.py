"""Numerical work that several bounds share: the best shifts, the best windows."""
