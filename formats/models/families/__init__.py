"""Derive a model's pools from its config as SGLang does. Each module has models of similar KV.

`architectures` says which family an architecture belongs to.
"""
