"""Warming a store: which pages to copy and in which order, from earlier requests."""
