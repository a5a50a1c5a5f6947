"""Read a store, run the checks on it, and report what is wrong."""
