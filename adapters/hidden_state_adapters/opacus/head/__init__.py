"""Runs of one linear head with a known loss: the step is computed from what the engine holds."""
