"""Noisy mini-batch block coordinate descent: Chen & Liu 2025 (arXiv 2407.08233)."""
