"""Text for terminals and other programs. No module of this package opens a store."""
