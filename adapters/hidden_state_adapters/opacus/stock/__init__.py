"""Runs of Opacus' own engine: what its hook, its loader and its model show of them."""
