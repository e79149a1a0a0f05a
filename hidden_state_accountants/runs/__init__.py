"""Records of runs, step by step, and their statements."""
