"""Kernels tuned for Hopper (SM90), CUDA C++ compiled at first use."""
