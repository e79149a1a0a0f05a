"""Where the gradients of a run come from, and what is looked at of its model."""
