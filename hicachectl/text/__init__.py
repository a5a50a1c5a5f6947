"""Text for terminals and other programs. No module here opens a store."""
