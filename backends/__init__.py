"""Stores of objects. All stores have one interface (`backends.base.Store`)."""
