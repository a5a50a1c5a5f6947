"""An incident in one command: why servers get no hits from a store, or wrong ones."""
