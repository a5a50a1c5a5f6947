"""Numeric kernels: numpy here, the device's twins beside them; they know bytes, not findings."""
