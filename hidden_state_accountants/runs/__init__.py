"""What an adapter saw of a run, step by step, and what is said about it."""
