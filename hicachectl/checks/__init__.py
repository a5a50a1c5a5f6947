"""One module per family of findings."""
