"""Read a store in bounded memory: threads, processes, rate limits, signals; shared tables."""
