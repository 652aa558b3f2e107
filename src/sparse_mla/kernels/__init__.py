"""Kernels: one op, one file, one name in `reference`, `torch`, `triton` and `hopper`."""
