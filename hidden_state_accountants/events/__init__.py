"""Declarations of a run: the events and their parts."""
