"""Requests as page chains, and their hits in a store."""
