"""Keys and bytes of the objects of an L3 store. The modules read no clock and import no torch.

Their only I/O is to read `models/sglang-RELEASE.json`, a file of the package.
"""
