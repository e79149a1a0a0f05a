"""The batches of a run: which records a step uses, and which batch the loop is working on."""
