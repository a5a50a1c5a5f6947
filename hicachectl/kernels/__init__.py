"""Numeric kernels in numpy, and in Triton for devices. They handle bytes, not findings."""
