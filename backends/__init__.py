"""Stores of objects: one module per store, one interface (`backends.base.Store`)."""
