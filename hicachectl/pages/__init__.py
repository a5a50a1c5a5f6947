"""Listings of stores, page groups, and the rows of `ls`."""
