"""Keys and bytes of the objects of an L3 store. Pure: no I/O, no clock, no torch at import."""
