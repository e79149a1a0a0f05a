"""Chien & Li 2024 (arXiv 2410.01068)."""
