"""Examine an incident: why servers get no hits from a store, or wrong ones."""
