"""Stores that keep each object in its own file, and their listings, reads, writes and moves."""
