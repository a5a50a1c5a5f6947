"""Read, work on and release objects: threads, processes, rates, signals."""
