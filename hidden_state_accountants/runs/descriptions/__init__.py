"""What a statement says of each kind of run, in words."""
