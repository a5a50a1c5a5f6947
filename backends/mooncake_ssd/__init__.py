"""Mooncake's SSD tier as a store, read from the files that a client leaves behind."""
