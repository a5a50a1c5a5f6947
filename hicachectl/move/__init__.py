"""Copy, remove, repair and restore page groups."""
