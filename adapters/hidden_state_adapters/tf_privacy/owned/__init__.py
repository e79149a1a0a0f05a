"""What stands behind a model that owns its run: data, clip, noise, update."""
