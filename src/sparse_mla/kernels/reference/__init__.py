"""Kernels written for reading: float64, loops, no speed."""
