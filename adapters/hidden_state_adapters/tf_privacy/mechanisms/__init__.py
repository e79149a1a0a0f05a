"""One private update rule each: its optimizer, and what kind of run its steps are."""
