"""A model's pools from its config, by what its KV is, as SGLang derives them.

`architectures` says which family an architecture belongs to.
"""
