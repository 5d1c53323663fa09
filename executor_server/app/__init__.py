"""The composition root: builds the daemon from its configuration, runs it, and shuts it down in order."""
