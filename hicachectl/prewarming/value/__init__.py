"""Estimate how likely requests use a block again, by a model fitted to the requests."""
