"""Text for terminals and programs; imports no store."""
