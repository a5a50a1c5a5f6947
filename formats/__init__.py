"""What the bytes and names of an L3 store mean. Pure: no I/O, no clock, no torch at import."""
