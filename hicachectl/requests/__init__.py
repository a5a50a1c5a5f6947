"""Read requests as chains of pages, and find their hits in a store."""
