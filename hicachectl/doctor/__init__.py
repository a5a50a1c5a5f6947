"""Find out why servers get no hits from a store, or hits with wrong data."""
