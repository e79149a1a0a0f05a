"""Noisy gradient descent as a Langevin diffusion: Chourasia, Ye, Shokri 2021 (arXiv 2102.05855)."""
