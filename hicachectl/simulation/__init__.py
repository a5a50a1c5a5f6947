"""Simulate caches of many sizes and policies from one reading of the requests."""
