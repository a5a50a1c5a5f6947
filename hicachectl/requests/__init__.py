"""Requests as page chains, and how far a store can serve them."""
