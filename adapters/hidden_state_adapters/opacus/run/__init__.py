"""One run of an engine: its arguments, its record, where it goes on."""
