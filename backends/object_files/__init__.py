"""Stores that keep each object in a file of its own: listing, reading, writing, moving."""
