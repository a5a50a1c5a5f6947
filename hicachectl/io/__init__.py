"""Read a store in bounded memory, at once or at a limited rate. Handle signals. Share tables."""
