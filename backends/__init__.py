"""Where objects live: one module per store, one small interface (`backends.base.Store`)."""
