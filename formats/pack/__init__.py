"""The form of pack files, documented in hcpack(5)."""
