"""Per-example gradients: their norms and weighted sums, stored or made on the fly."""
