"""Numeric kernels on bytes, not findings: numpy, and Triton on devices."""
