"""What the user declares about a run: the events and their parts."""
