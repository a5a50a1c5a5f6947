"""Read a store, run the checks, and report the findings."""
