"""The data path from a store: threads, processes, rates, signals."""
