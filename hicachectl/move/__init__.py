"""Moving page groups: into a store, out of it, and between stores."""
