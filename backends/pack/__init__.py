"""Packs as stores."""
