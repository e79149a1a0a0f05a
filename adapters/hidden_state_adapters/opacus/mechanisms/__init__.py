"""Private update rules: one file for each, in the middle of the one step that all share."""
