"""Divide a run of a command among many processes, and join their results."""
