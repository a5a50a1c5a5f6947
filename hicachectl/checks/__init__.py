"""Checks of stores, and their findings."""
